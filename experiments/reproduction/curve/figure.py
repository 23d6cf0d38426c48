"""The figure: accuracy against measured peak and reads, three tasks, error bars."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from dms_jax.analysis.labels import label_heights
from experiments.reproduction.curve.plan import FURTHER, TRAINING_FREE, VARIANTS

_LABELS = {"peak": "peak live tokens of a chain", "reads": "KV reads of a chain"}
_TICKS = {"peak": (1, 2, 5), "reads": (1, 3)}
_NAMES = {FURTHER: "trained further", "vanilla": "the model", "RandomEviction": "random"}
_COLOURS = {
    "vanilla": "#222222",
    FURTHER: "#5f6a6a",
    "TOVA": "#7d8c2f",
    "StreamingLLM": "#2471a3",
    "RandomEviction": "#8e8e8e",
}
_DMS = "#c0392b"
_BETWEEN_NAMES = 5.5  # % of the height of a panel


def draw(data: Mapping[str, Any], path: pathlib.Path) -> None:
    """Writes the figure; the best DMS variant in colour, the others behind it.

    Args:
      data: what `results.json` holds.
      path: the PNG file.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    figure = Figure(figsize=(14, 7.4), layout="constrained")
    tasks, best = list(data["tasks"]), data["best_dms"]
    systems = {point["system"] for point in data["points"]}
    others = [name for name in VARIANTS if name in systems and name != best]
    named = dict.fromkeys(("vanilla", data["control"], *TRAINING_FREE, best))
    axes = figure.subplots(2, len(tasks), sharey="col", squeeze=False)
    for row, axis in enumerate(_LABELS):
        for column, task in enumerate(tasks):
            panel = axes[row][column]
            lines = {name: _points(data, name, task, axis) for name in (*others, *named)}
            for name in others:
                _line(panel, lines[name], colour=_DMS, alpha=0.25, width=1)
            shown = [name for name in named if lines[name]]
            for name in shown:
                bold = dict(width=2) if name == best else {}
                _line(panel, lines[name], colour=_COLOURS.get(name, _DMS), **bold)
            _name(panel, {name: lines[name] for name in shown}, best)
            panel.set_xscale("log")
            low, high = panel.get_xlim()
            wide = high / low
            panel.set_xlim(low / wide**0.12, high * wide**0.4)  # room for the names
            panel.xaxis.set_major_locator(LogLocator(subs=_TICKS[axis]))
            panel.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
            panel.xaxis.set_minor_formatter(NullFormatter())
            panel.set_xlabel(_LABELS[axis])
            panel.set_title(task if row == 0 else "")
            panel.set_ylim(bottom=0)
            panel.grid(alpha=0.25)
            if column == 0:
                panel.set_ylabel("accuracy of one chain, %")
    title = "Accuracy against what the cache held and what was read; bars: one standard error"
    if others:
        title += "; faint: other DMS variants"
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _points(
    data: Mapping[str, Any], name: str | None, task: str, axis: str
) -> list[tuple[float, float, float]]:
    """What was spent, the accuracy and its error in percent, from the least spent on."""
    return sorted(
        (point[axis], 100 * point["accuracy"], 100 * point["error"])
        for point in data["points"]
        if (point["system"], point["task"]) == (name, task)
    )


def _name(panel, lines: Mapping[str, Sequence[tuple[float, ...]]], best: str | None) -> None:
    """Writes names beside the right ends of lines; DMS's, above the others', at its left end."""
    beside: dict[str, Any] = dict(textcoords="offset points", va="center")
    if best is not None and best in lines:
        at = lines[best][0][:2]
        panel.annotate("DMS", at, xytext=(-9, 0), ha="right", color=_DMS, **beside)
    highest = max((y for line in lines.values() for _, y, _ in line), default=0)
    gap = _BETWEEN_NAMES / 100 * highest
    for sign in (1, -1):  # names of high ends make room downwards, those of low ends upwards
        half = {
            name: (line[-1][0], sign * max(line[-1][1], gap / 2))
            for name, line in lines.items()
            if name != best and (line[-1][1] > highest / 2) == (sign == 1)
        }
        heights = label_heights(list(half.values()), gap, log=True)
        for (name, (x, _)), height in zip(half.items(), heights, strict=True):
            told, at = _NAMES.get(name, name), (x, sign * height)
            panel.annotate(told, at, xytext=(9, 0), color=_COLOURS[name], **beside)


def _line(panel, points, *, colour, alpha=1.0, width=1.5) -> None:
    if not points:
        return
    spent, accuracies, errors = zip(*points, strict=True)
    alone = len(points) == 1
    panel.errorbar(
        spent,
        accuracies,
        yerr=errors,
        marker="*" if alone else "o",
        markersize=11 if alone else 4,
        linewidth=width,
        capsize=2,
        color=colour,
        alpha=alpha,
    )
