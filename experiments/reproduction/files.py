"""Text of the pages that scripts write: tables, errors, filled paragraphs."""

import math
import os
import pathlib
import textwrap
from collections.abc import Sequence

_WIDTH = 100  # of a line of a page


def write_text(path: pathlib.Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def error_text(error: float | None, form: str) -> str:
    """A standard error on a page; that of a single observation is unknown: NaN, and null in JSON.

    # In: 0.0213, ".2f"  Out: "± 0.02"       nan, ".2f"  "± unknown"
    """
    known = error is not None and not math.isnan(error)
    return f"± {error:{form}}" if known else "± unknown"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose first column is text."""
    line = "|---" + "|---:" * (len(heads) - 1) + "|"
    return "\n".join(
        ["| " + " | ".join(heads) + " |", line, *("| " + " | ".join(r) + " |" for r in rows)]
    )


def wrap(page: str) -> str:
    """Fills the paragraphs and list items of a Markdown page in which a line is too long."""
    blocks: list[list[str]] = []
    for line in page.split("\n"):
        kept = not line or line.startswith(("|", "#", "!", "    "))
        if kept or line.startswith("- ") or not blocks or not blocks[-1]:
            blocks.append([line])
        else:
            blocks[-1].append(line)
        if kept:
            blocks.append([])  # the next line begins a block
    return "\n".join("\n".join(_filled(block)) for block in blocks if block)


def _filled(block: Sequence[str]) -> Sequence[str]:
    if block[0].startswith(("|", "#", "!", "    ")) or max(map(len, block)) <= _WIDTH:
        return block
    return textwrap.wrap(
        " ".join(line.strip() for line in block),
        _WIDTH,
        subsequent_indent="  " if block[0].startswith("- ") else "",
        break_long_words=False,
        break_on_hyphens=False,
    )
