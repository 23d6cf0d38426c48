"""The pictures of REPORT.md: few series, names at their ends, axes in plain numbers, errors drawn.

matplotlib is imported where it is used.
"""

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dms_jax.analysis.hyperscaling_plot import hyperscaling_figure
from dms_jax.analysis.labels import label_heights
from dms_jax.evaluation.hyperscaling_result import Hyperscaling
from experiments.reproduction.claims.results import Results
from experiments.reproduction.claims.systems import HAYSTACKS, KCACHE_LAYERS, KCACHE_TOPS, VANILLA

# Colours that the usual kinds of colour blindness tell apart; a system keeps its own on the page.
_COLOURS = ("#c0392b", "#2471a3", "#7d8c2f", "#8e44ad", "#b9770e", "#222222")
_OWN = {"vanilla": "#222222", "DMS": "#c0392b", "DMC": "#2471a3"}
_DPI = 130


def frontier(result: Hyperscaling, path: pathlib.Path) -> None:
    """Votes against reads and against peak."""
    hyperscaling_figure(
        path, result, title="Reasoning by vote, at equal reads and at equal peak", method="vote"
    )


def windows(results: Results, names: Mapping[str, str], path: pathlib.Path) -> None:
    """Accuracy against the ratio, windows of 16 and 64, delayed and immediate; a window of 0."""
    shown = [label for label in names if "256" not in label]
    lines = {}
    for label in shown:
        cells = [(float(at), results.cell(names[label], at, "reasoning")) for at in ("2", "3", "4")]
        lines[label] = [(at, cell.accuracy) for at, cell in cells if cell]
    _lines(
        lines,
        path,
        title="Windows, and when a token is decided on",
        x="compression ratio that was trained for",
        y="reasoning, one chain, %",
        ticks=[2, 3, 4],
        level=_vanilla(results, "reasoning"),
    )


def tokens(
    results: Results,
    series: Mapping[str, Sequence[str]],
    tokens_to: Callable[[Results, str, float], float | None],
    path: pathlib.Path,
) -> None:
    """Accuracy at 4 against the tokens that it took."""
    lines = {}
    for label, systems in series.items():
        found = [
            (tokens_to(results, system, 4.0), results.cell(system, "4", "reasoning"))
            for system in systems
        ]
        lines[label] = [(at / 1e6, cell.accuracy) for at, cell in found if at and cell]
    _lines(
        lines,
        path,
        title="Tokens of training, at a ratio of 4",
        x="million tokens of training",
        y="reasoning, one chain, %",
        log=True,
        level=_vanilla(results, "reasoning"),
    )


def longer(
    results: Results,
    systems: Mapping[str, tuple[str, Sequence[str]]],
    path: pathlib.Path,
) -> None:
    """Needle and tracking against the length of the context, at the highest ratio of each."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    for axes, task in zip(figure.subplots(1, 2, sharey=True), ("needle", "tracking"), strict=True):
        lines = {}
        for label, (system, settings) in systems.items():
            cells = [
                (tokens, results.cell(system, settings[-1], f"{task}{tokens}"))
                for tokens in HAYSTACKS
            ]
            at = "" if settings[-1] == "1" else f" at {settings[-1]}"
            lines[f"{label}{at}"] = [(tokens, cell.accuracy) for tokens, cell in cells if cell]
        _draw(axes, lines, log=True, ticks=list(HAYSTACKS))
        axes.set_title(task)
        axes.set_xlabel("tokens of the context")
    figure.axes[0].set_ylabel("right, %")
    figure.suptitle("Contexts beyond the 512 tokens of the training")
    figure.savefig(path, dpi=_DPI)


def kcache(results: Results, path: pathlib.Path) -> None:
    """Accuracy over N and the number of first layers that read everything."""
    from matplotlib.figure import Figure

    grid = np.full((len(KCACHE_LAYERS), len(KCACHE_TOPS)), np.nan)
    for row, layers in enumerate(KCACHE_LAYERS):
        for column, top in enumerate(KCACHE_TOPS):
            if cell := results.cell("kcache", f"N{top}L{layers}", "reasoning"):
                grid[row, column] = 100 * cell.accuracy.value
    figure = Figure(figsize=(5.6, 3.8), layout="constrained")
    axes = figure.subplots()
    low, high = np.nanmin(grid) - 3, np.nanmax(grid)
    image = axes.imshow(grid, cmap="viridis", vmin=low, vmax=high, aspect="auto")
    for (row, column), value in np.ndenumerate(grid):
        if not np.isnan(value):
            dark = value < (low + high) / 2
            colour = "white" if dark else "black"
            axes.text(column, row, f"{value:.0f}", ha="center", va="center", color=colour)
    axes.set_xticks(range(len(KCACHE_TOPS)), [str(top) for top in KCACHE_TOPS])
    axes.set_yticks(range(len(KCACHE_LAYERS)), [str(layers) for layers in KCACHE_LAYERS])
    axes.set_xlabel("N, values that each query head fetches")
    axes.set_ylabel("first layers that read all")
    level = _vanilla(results, "reasoning")
    whole = "" if level is None else f" (all values: {level:.0f})"
    axes.set_title(f"KCache: reasoning, one chain, %{whole}")
    figure.colorbar(image, ax=axes)
    figure.savefig(path, dpi=_DPI)


def throughput(rows: Sequence[Mapping[str, Any]], path: pathlib.Path) -> None:
    """How many times dense throughput, against the ratio, for each context."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 4), layout="constrained")
    axes = figure.subplots()
    beside: dict[str, Any] = dict(xytext=(8, 0), textcoords="offset points", va="center")
    for colour, context in zip(
        _COLOURS[1:], sorted({row["context"] for row in rows}), strict=False
    ):
        own = sorted((row for row in rows if row["context"] == context), key=lambda r: r["ratio"])
        if own[0]["ratio"] != 1:
            continue
        times = [row["tokens_per_second"] / own[0]["tokens_per_second"] for row in own]
        axes.plot([row["ratio"] for row in own], times, marker="o", color=colour)
        axes.annotate(f"{context:,} tokens", (own[-1]["ratio"], times[-1]), color=colour, **beside)
    ratios = sorted({row["ratio"] for row in rows})
    axes.plot(ratios, ratios, color="#999999", linestyle=":")
    axes.annotate("as the ratio", (ratios[-1], ratios[-1]), color="#777777", **beside)
    axes.set_xlim(right=1.4 * ratios[-1])  # room for the names
    axes.set_xticks(ratios)
    axes.set_xlabel("compression ratio")
    axes.set_ylabel("times the dense throughput")
    axes.set_title("Largest batch that fits")
    axes.grid(alpha=0.2)
    figure.savefig(path, dpi=_DPI)


def _vanilla(results: Results, measure: str) -> float | None:
    cell = results.cell(VANILLA, "1", measure)
    return 100 * cell.accuracy.value if cell else None


def _lines(
    lines: Mapping[str, Sequence[tuple[float, Any]]],
    path: pathlib.Path,
    *,
    title: str,
    x: str,
    y: str,
    log: bool = False,
    ticks: Sequence[float] | None = None,
    level: float | None = None,
) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.4, 4.4), layout="constrained")
    axes = figure.subplots()
    if level is not None:
        axes.axhline(level, color="#999999", linestyle=":", linewidth=1)
        axes.annotate(
            "vanilla",
            (0.01, level),
            (0, 3),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            color="#777777",
        )
    _draw(axes, lines, log=log, ticks=ticks, level=level)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(title)
    figure.savefig(path, dpi=_DPI)


def _colours(labels: Sequence[str]) -> list[str]:
    """A colour for each line: its system's own where it begins with its name, else the next."""
    own = [
        next((c for name, c in _OWN.items() if label.startswith(name)), None) for label in labels
    ]
    left = iter([colour for colour in _COLOURS if colour not in own])
    return [colour or next(left) for colour in own]


def _heights(ends: Sequence[tuple[float, float]], gap: float, level: float | None) -> list[float]:
    """Heights of labels: those of ends above the level climb from it, the others fall.

    # In: (4, 60.6), (4, 60.4), (4, 59), gap 4, level 60  Out: [66, 62, 58]
    """
    if level is None:
        return label_heights(ends, gap, log=False)
    above, below = ([y for _, y in ends if (y >= level) is side] for side in (True, False))
    # The level takes a place too, before every label that could lie on it.
    up = label_heights([(0, gap / 2 - level), *((0, -y) for y in above)], gap, log=False)
    down = label_heights([(0, level + gap / 2), *((0, y) for y in below)], gap, log=False)
    climbing, falling = iter(up[1:]), iter(down[1:])
    return [-next(climbing) if y >= level else next(falling) for _, y in ends]


def _draw(
    axes,
    lines: Mapping[str, Sequence[tuple[float, Any]]],
    *,
    log: bool,
    ticks: Sequence[float] | None,
    level: float | None = None,
) -> None:
    """Lines with errors, and their names at their ends, moved apart and off a drawn level."""
    if log:
        axes.set_xscale("log")
    ends = []
    known = [(label, line) for label, line in lines.items() if line]
    for (label, line), colour in zip(known, _colours([label for label, _ in known]), strict=True):
        axes.errorbar(
            [at for at, _ in line],
            [100 * each.value for _, each in line],
            yerr=[100 * each.error for _, each in line],
            color=colour,
            marker="o",
            markersize=4,
            capsize=2,
        )
        ends.append((line[-1][0], 100 * line[-1][1].value, label, colour))
    top = axes.get_ylim()[1]
    axes.set_ylim(0, 1.08 * min(top, 102))
    low, high = axes.get_ylim()
    places = [(x, y) for x, y, _, _ in ends]
    heights = _heights(places, 0.055 * (high - low), level)
    for (x, _, label, colour), height in zip(ends, heights, strict=True):
        axes.text(x * 1.04 if log else x + 0.05, height, label, color=colour, va="center")
    left, right = axes.get_xlim()
    room = 0.03 * max(len(label) for label, _ in known) if known else 0.0
    axes.set_xlim(left, right * (right / left) ** room if log else right + room * (right - left))
    if ticks is not None:
        axes.set_xticks(list(ticks), [f"{tick:,g}" for tick in ticks])
    elif log:
        steps = [digit * 10**power for power in range(6) for digit in (1, 2, 5)]
        shown = [step for step in steps if left <= step <= right]
        axes.set_xticks(shown, [f"{step:,}" for step in shown])
    axes.set_xticks([], minor=True)
    axes.grid(alpha=0.2)
