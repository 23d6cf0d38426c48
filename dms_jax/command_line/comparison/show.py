"""The tables and the picture of a comparison."""

import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from dms_jax.command_line.comparison.measure import Measured

# What the picture shows of many systems, and in which colours.
DRAWN = ("DMS", "GQA", "DMC", "SnapKV", "StreamingLLM", "TOVA")
COLOURS = ("#c0392b", "#7d3c98", "#2471a3", "#b9770e", "#222222", "#7d8c2f")
NOTE = """\
Averages over sequences, layers and KV heads.

- reads: entries read by all steps of a sequence. Where query heads choose for themselves
  (Quest, KCache) it is each one's count.
- kB: pages and policy state of a sequence on the device, at its end and at most. Values that
  KCache moves to host memory are not among them.
- ±: one standard error over sequences or problems, unknown of a single one. That of
  "above dense" is of the differences, pair by pair."""


def in_order(rows: Sequence[Measured]) -> list[Measured]:
    """Ratio by ratio, the least loss first, what failed last."""
    return sorted(rows, key=lambda row: (row.ratio, row.failed is not None, row.increase))


def _error(error: float, digits: int) -> str:
    """A standard error behind its figure."""
    return f" ±{error:.{digits}f}" if math.isfinite(error) else " ±unknown"


def text_cells(row: Measured, dense: Measured) -> dict[str, str]:
    """What a row says of the text, by column."""
    return {
        "nats/token": f"{row.nats:.4f}{_error(row.error, 4)}",
        "above dense": f"{row.increase:+.4f}{_error(row.increase_error, 4)}",
        "live": f"{row.live:.0f}",
        "peak": f"{row.peak:.0f}",
        "reads": f"{row.reads:,.0f}",
        "": f"÷{dense.reads / row.reads:.2f}",
        "kB": f"{row.bytes / 1e3:.0f}",
        "peak kB": f"{row.peak_bytes / 1e3:.0f}",
    }


def answer_cells(row: Measured, dense: Measured) -> dict[str, str]:
    """What a row says of the answers, by column."""
    cells = {}
    for name, part in row.answers.items():
        whole = dense.answers[name]
        cells[f"{name}, %"] = f"{100 * part['accuracy']:.1f}{_error(100 * part['error'], 1)}"
        cells[f"change ({name})"] = (
            f"{100 * part['change']:+.1f}{_error(100 * part['change_error'], 1)}"
            if row is not dense
            else "-"
        )
        cells[f"peak ({name})"] = f"{part['peak']:.0f}"
        cells[f"reads ({name})"] = f"÷{whole['reads'] / max(part['reads'], 1e-9):.2f}"
    return cells


def brief_cells(row: Measured, dense: Measured) -> dict[str, str]:
    """Of the answers, what a terminal has room for."""
    cells = {}
    for name, part in row.answers.items():
        times = [dense.answers[name][x] / max(part[x], 1e-9) for x in ("peak", "reads")]
        figure = f"{100 * part['accuracy']:.1f}{_error(100 * part['error'], 1)}"
        cells[f"{name}, %, peak, reads"] = f"{figure} ÷{times[0]:.2f} ÷{times[1]:.2f}"
    return cells


def show(console: Console, rows: Sequence[Measured]) -> None:
    """Prints the tables."""
    _print(console, "Held-out text, decoded token by token from the paged cache", rows, text_cells)
    if any(row.answers for row in rows):
        _print(console, "Answers", rows, brief_cells)
    console.print(NOTE, highlight=False)


def _print(
    console: Console,
    title: str,
    rows: Sequence[Measured],
    cells: Callable[[Measured, Measured], dict[str, str]],
) -> None:
    dense = rows[0]
    table = Table(title=title, box=SIMPLE)
    table.add_column("cache", no_wrap=True)
    columns = list(cells(dense, dense))
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    ordered = in_order(rows)
    for index, row in enumerate(ordered):
        last = index + 1 == len(ordered) or ordered[index + 1].ratio != row.ratio
        if row.failed is not None:
            table.add_row(row.name, "not possible", end_section=last)
            continue
        own = cells(row, dense)
        table.add_row(row.name, *(own.get(name, "") for name in columns), end_section=last)
    console.print(table)


def picture(path: pathlib.Path, rows: Sequence[Measured], *, model: str) -> None:
    """Draws the loss above dense against what was measured of reads and live tokens.

    Six lines at most, those of `DRAWN` that were measured; the tables have the others. Where there
    are answers, also their accuracy against live tokens and reads.
    """
    from matplotlib.figure import Figure

    dense, others = rows[0], [row for row in rows[1:] if row.failed is None]
    measured = {row.label for row in others}
    labels = [label for label in DRAWN if label in measured]
    labels = (labels + sorted(measured - set(labels)))[: len(COLOURS)]
    parts = list(dense.answers)
    figure = Figure(figsize=(11, 0.6 + 3.8 * (1 + len(parts))), layout="constrained")
    left_out = len(measured) - len(labels)
    title = f"{model}: {len(labels)} cache policies"
    figure.suptitle(f"{title}; {left_out} others are in the tables" if left_out else title)
    grid = figure.subplots(1 + len(parts), 2, squeeze=False, sharey="row")
    panels = (("peak", "times fewer live tokens at the peak"), ("reads", "times fewer reads"))
    named: list[tuple[Any, list[End]]] = []

    def draw(axes: Any, point: Callable[[Measured], tuple[float, float, float] | None]) -> None:
        ends, least = [], 1.0
        for label, colour in zip(labels, COLOURS, strict=False):
            found = [point(row) for row in others if row.label == label]
            points = sorted(each for each in found if each is not None)
            if points:
                fewer, height, error = zip(*points, strict=True)
                axes.errorbar(fewer, height, error, marker="o", ms=4, capsize=2, color=colour)
                ends.append(End(fewer[-1], height[-1], label, colour, alone=len(fewer) == 1))
                least = min(least, fewer[0])  # below 1 where wrong answers are longer
        axes.set_xscale("log", base=2)
        ticks = [2.0**power for power in range(-3, 6)]
        axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
        axes.set_xlim(0.8 * least, max([end.x for end in ends], default=2) * 2.2)
        axes.grid(alpha=0.3)
        named.append((axes, ends))

    def against_dense(row: Measured, field: str) -> tuple[float, float, float]:
        return getattr(dense, field) / getattr(row, field), row.increase, row.increase_error

    for axes, (field, text) in zip(grid[0], panels, strict=True):
        draw(axes, lambda row, f=field: against_dense(row, f))
        axes.axhline(0, color="#222222", linewidth=0.8)
        axes.set_xlabel(text)
    low = [0, 0.01, 0.03, 0.1, 0.3, 1, 3]
    grid[0][0].set_yscale("symlog", linthresh=0.01)
    _, top = grid[0][0].get_ylim()
    grid[0][0].set_ylim(-0.004, 1.5 * top)  # room for a name
    grid[0][0].set_yticks(low, [f"{each:g}" for each in low])
    grid[0][0].set_ylabel("nats a token above dense")

    def answered(row: Measured, name: str, field: str) -> tuple[float, float, float] | None:
        if name not in row.answers:
            return None
        part, whole = row.answers[name], dense.answers[name]
        right = 100 * part["accuracy"], 100 * part.get("error", 0.0)
        return whole[field] / max(part[field], 1e-9), *right

    for line, name in zip(grid[1:], parts, strict=True):
        for axes, (field, text) in zip(line, panels, strict=True):
            draw(axes, lambda row, n=name, f=field: answered(row, n, f))
            axes.axhline(100 * dense.answers[name]["accuracy"], color="#222222", linewidth=0.8)
            axes.set_xlabel(text)
        line[0].set(ylabel=f"{name}, % right", ylim=(-9, None))  # room for names at the bottom
    figure.draw_without_rendering()  # places are known after it
    for axes, ends in named:
        _label_apart(axes, ends)
    figure.savefig(path, dpi=110)


class End(NamedTuple):
    """Where a line ends, its name and colour, and whether it is a single point."""

    x: float
    y: float
    label: str
    colour: str
    alone: bool


def _label_apart(axes: Any, ends: list[End]) -> None:
    """Writes names where lines end, one below another where they would meet.

    A single point has its name on its left, since the lines of others may begin beside it.
    """
    from matplotlib.patheffects import withStroke

    lowest = {False: float("inf"), True: float("inf")}
    for end in sorted(ends, key=lambda end: -axes.transData.transform(end[:2])[1]):
        place = axes.transData.transform(end[:2])[1]
        height = min(place, lowest[end.alone] - 12 * axes.figure.dpi / 72)  # letters have 9 points
        lowest[end.alone] = height
        axes.annotate(
            end.label,
            end[:2],
            xytext=(-6 if end.alone else 6, (height - place) * 72 / axes.figure.dpi),
            textcoords="offset points",
            color=end.colour,
            ha="right" if end.alone else "left",
            va="center",
            fontsize=9,
            path_effects=[withStroke(linewidth=3, foreground="white")],
            zorder=4,
        )
