"""The tables of a comparison in Markdown, for the page of results."""

import pathlib
from collections.abc import Callable, Sequence

from dms_jax.command_line.comparison.measure import Measured
from dms_jax.command_line.comparison.show import NOTE, answer_cells, in_order, text_cells


def write_page(path: pathlib.Path, rows: Sequence[Measured]) -> None:
    """Writes every row: what the text showed, then the answers."""
    parts = ["# Every row", NOTE, "## Text", markdown(rows, text_cells)]
    if any(row.answers for row in rows):
        parts += ["## Answers", markdown(rows, answer_cells)]
    failed = [f"- {row.name}: {row.failed}" for row in rows if row.failed is not None]
    if failed:
        parts += ["## Not possible", "\n".join(failed)]
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def markdown(
    rows: Sequence[Measured], cells: Callable[[Measured, Measured], dict[str, str]]
) -> str:
    """A table of the rows that have something to say."""
    dense = rows[0]
    columns = list(cells(dense, dense))
    lines = ["| cache | " + " | ".join(columns) + " |", "|---" + "|---:" * len(columns) + "|"]
    for row in in_order(rows):
        own = cells(row, dense) if row.failed is None else {}
        if own:
            lines.append(f"| {row.name} | " + " | ".join(own.get(c, "") for c in columns) + " |")
    return "\n".join(lines)
