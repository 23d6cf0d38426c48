"""Prints descriptions for `--help`, with wrapped paragraphs; tyro prints the options."""

import shutil
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

LONGEST = 100  # the most characters of a line of prose
ASKED = ("-h", "--help")


def show(description: str | None, given: Sequence[str]) -> None:
    """Prints the description if --help is among the arguments; tyro then prints the options."""
    if description and not set(ASKED).isdisjoint(given):
        print(filled(description, _columns()), end="\n\n")


def show_points(program: str, points: Mapping[str, tuple[str, Any]]) -> None:
    """Prints the starting points with their descriptions."""
    width = max(map(len, points)) + 2
    print(f"usage: {program} [STARTING-POINT] [OPTIONS]\n")
    for name, (what, _) in points.items():
        lines = textwrap.wrap(what, _columns() - width - 2, break_on_hyphens=False)
        print(f"  {name:{width}}" + f"\n{' ' * (width + 2)}".join(lines))
    print(
        f"\n{program} NAME --help shows the options of one. Without a name: {next(iter(points))}."
    )


def _columns() -> int:
    """Returns the width of prose on this terminal."""
    return min(shutil.get_terminal_size().columns, LONGEST)


def filled(text: str, width: int) -> str:
    """Returns a text with wrapped paragraphs; indented blocks, such as commands, are kept."""
    parts: list[str] = []
    for block in textwrap.dedent(text).strip().split("\n\n"):
        indented = any(line.startswith(" ") for line in block.splitlines())
        parts.append(block if indented else textwrap.fill(block, width, break_on_hyphens=False))
    return "\n\n".join(parts)
