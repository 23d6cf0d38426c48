"""The figure: accuracy against measured peak and reads, three tasks, error bars."""

import pathlib

from experiments.reproduction.curve.analysis import Axis, Results
from experiments.reproduction.curve.plan import FURTHER, TRAINING_FREE

_LABELS = {"peak": "peak live tokens of a chain", "reads": "KV reads of a chain"}
_COLOURS = {
    "vanilla": "#222222",
    FURTHER: "#7f8c8d",
    "TOVA": "#7d8c2f",
    "StreamingLLM": "#2471a3",
    "RandomEviction": "#b8b8b8",
}
_DMS = "#c0392b"


def draw(results: Results, path: pathlib.Path) -> None:
    """Writes the figure; the best DMS variant in colour, the others behind it."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    figure = Figure(figsize=(13, 7.4), layout="constrained")
    tasks = results.config.asked
    axes = figure.subplots(2, len(tasks), sharey="col", squeeze=False)
    rows: tuple[Axis, ...] = ("peak", "reads")
    others = [name for name in results.variants if name != results.best]
    for row, axis in enumerate(rows):
        for column, task in enumerate(tasks):
            panel = axes[row][column]
            for name in others:
                _line(panel, results, name, task, axis, colour=_DMS, alpha=0.25, width=1)
            for name in ("vanilla", results.control, *TRAINING_FREE):
                _line(panel, results, name, task, axis, colour=_COLOURS[name], label=name)
            if results.best:
                _line(panel, results, results.best, task, axis, colour=_DMS, label="DMS", width=2)
            panel.set_xscale("log")
            panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            panel.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
            panel.xaxis.set_minor_formatter(NullFormatter())
            panel.set_xlabel(_LABELS[axis])
            panel.set_title(task if row == 0 else "")
            panel.set_ylim(bottom=0)
            panel.grid(alpha=0.25)
            if column == 0:
                panel.set_ylabel("accuracy of one chain, %")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    title = "Accuracy against what the cache held and what was read; bars: one standard error"
    if others:
        title += "; faint: other DMS variants"
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _line(panel, results, name, task, axis, *, colour, label=None, alpha=1.0, width=1.5) -> None:
    points = sorted(results.of(name, task), key=lambda point: getattr(point, axis))
    if not points:
        return
    accuracies = [point.accuracy for point in points]
    alone = len(points) == 1
    panel.errorbar(
        [getattr(point, axis) for point in points],
        [100 * accuracy.value for accuracy in accuracies],
        yerr=[100 * accuracy.error for accuracy in accuracies],
        marker="*" if alone else "o",
        markersize=11 if alone else 4,
        linewidth=width,
        capsize=2,
        color=colour,
        alpha=alpha,
        label=label,
    )
