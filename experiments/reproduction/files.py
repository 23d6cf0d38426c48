"""Files of a run directory: JSON written beside its place and renamed; provenance."""

import datetime
import json
import math
import os
import pathlib
import textwrap
from collections.abc import Iterable, Sequence, Set
from importlib import metadata
from typing import Any

import numpy as np

import dms_jax
from dms_jax.json_text import json_text

_WIDTH = 100  # of a line of a page


def provenance() -> dict[str, Any]:
    """Versions and date of this run."""
    return {
        "versions": {name: metadata.version(name) for name in ("jax", "jaxlib", "flax")},
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
    }


def write_json(path: pathlib.Path, data: Any) -> None:
    """Writes a file beside its place and renames it; what is not finite becomes null."""
    write_text(path, json_text(data) + "\n")


def write_text(path: pathlib.Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def give_back(root: pathlib.Path, job: str, reason: str) -> None:
    """Frees a job whose process died, for one more process; the second that dies of it fails it.

    Args:
      root: the run directory.
      job: name of the job, which the process has locked.
      reason: what it died of.
    """
    once = root / "died" / f"{job}.txt"
    if once.exists():
        write_text(root / "failed" / f"{job}.txt", f"{once.read_text()}{reason.rstrip()}\n")
    else:
        write_text(once, f"{reason.rstrip()}\n")
    (root / "locks" / job).unlink()  # last: from here on others may take it


def write_arrays(path: pathlib.Path, **arrays: Any) -> None:
    """Writes an .npz file beside its place and renames it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")  # no .npz if it is cut off here
    with part.open("wb") as file:
        np.savez_compressed(file, **arrays)
    part.replace(path)


def error_text(error: float | None, form: str) -> str:
    """A standard error on a page; that of a single observation is unknown: NaN, and null in JSON.

    # In: 0.0213, ".2f"  Out: "± 0.02"       nan, ".2f"  "± unknown"
    """
    known = error is not None and not math.isnan(error)
    return f"± {error:{form}}" if known else "± unknown"


def command(program: str, options: Iterable[str]) -> str:
    """A command as a block of a page, over as many lines as it takes.

    Args:
      program: what is called.
      options: each with its values, which stay on a line with it.
    """
    lines = [program]
    for option in options:
        if len(f"    {lines[-1]} {option} \\") > _WIDTH:
            lines.append(f"    {option}")
        else:
            lines[-1] += f" {option}"
    return " \\\n".join(f"    {line}" for line in lines)


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


def read_json(path: pathlib.Path) -> Any:
    """What a file holds; None where there is none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def refuse_other_settings(before: Any, config: Any, names: Set[str]) -> None:
    """Refuses to go on in a run directory with other settings than those that made what it holds.

    Raises:
      ConfigError: a setting of these names differs.
    """
    other = [
        f"{name}={getattr(before, name)!r}, not {getattr(config, name)!r}"
        for name in vars(config)
        if name in names and getattr(before, name) != getattr(config, name)
    ]
    if other:
        raise dms_jax.ConfigError(
            f"{config.out} holds what was made with {'; '.join(other)}. Give the same settings to "
            "go on, or another --out."
        )
