"""Figure of `hyperscale`: score against reads and against peak tokens, with each system's frontier.

The budgets are on logarithmic axes with plain numbers. Faint dots are points below their system's
frontier; the line joins the frontier, with the system's name on its right. Squares are greedy
answers; a system without one is dashed and labelled.
matplotlib is imported where it is used.
"""

import pathlib
from collections.abc import Sequence

from dms_jax.checks import Number, require
from dms_jax.evaluation import AXES, Axis, Hyperscaling, Method

# Six colours that are distinct with common colour blindness, and dark enough for text on white.
_COLOURS = ("#222222", "#c0392b", "#2471a3", "#7d8c2f", "#8e44ad", "#b9770e")
MOST_SYSTEMS = len(_COLOURS)
_TITLES: dict[Axis, str] = {
    "reads": "KV reads a problem, all chains",
    "peak": "peak tokens of a problem, all chains",
}
_LEGEND = "squares: one greedy answer; dots: sampled answers; faint: below the system's frontier"


def hyperscaling_figure(
    path: pathlib.Path, result: Hyperscaling, *, title: str, method: Method = "vote"
) -> None:
    """Draws the points and frontiers of at most six systems.

    Args:
      path: output file; the suffix decides the format.
      result: from `hyperscale`.
      title: title of the figure.
      method: the score to draw.

    Raises:
      ConfigError: there are no systems, or more than six.
    """
    from matplotlib.figure import Figure

    require(
        1 <= len(result.systems) <= MOST_SYSTEMS,
        f"The figure shows one to {MOST_SYSTEMS} systems, got {len(result.systems)}. Make a "
        "Hyperscaling with the points of fewer systems.",
    )
    figure = Figure(figsize=(12, 4.8), layout="constrained")
    figure.suptitle(title)
    figure.supxlabel(_LEGEND, fontsize="small")
    for axes, axis in zip(figure.subplots(1, 2, sharey=True), AXES, strict=True):
        ends = []
        for system, colour in zip(result.systems, _COLOURS, strict=False):
            best = result.frontier(system, axis, method)
            scores = [point.accuracy(method) for point in best]
            axes.errorbar(
                [point.budget(axis) for point in best],
                [100 * score.value for score in scores],
                yerr=[100 * score.error for score in scores],
                color=colour,
                marker="o",
                markersize=4,
                linewidth=1.6,
                linestyle="-" if result.has_greedy(system) else "--",
                capsize=2,
            )
            greedy = [point for point in result.of(system) if point.greedy]
            axes.plot(
                [point.budget(axis) for point in greedy],
                [100 * point.accuracy(method).value for point in greedy],
                linestyle="",
                marker="s",
                markersize=7,
                color=colour,
            )
            others = [point for point in result.of(system) if point not in best]
            axes.plot(
                [point.budget(axis) for point in others],
                [100 * point.accuracy(method).value for point in others],
                linestyle="",
                marker="o",
                markersize=3,
                alpha=0.3,
                color=colour,
            )
            ends.append((best[-1].budget(axis), 100 * scores[-1].value))
        _plain_log(axes, [point.budget(axis) for point in result.points])
        axes.set_xlabel(_TITLES[axis])
        axes.grid(alpha=0.2)
        names = [
            system if result.has_greedy(system) else f"{system}\n(no greedy point recorded)"
            for system in result.systems
        ]
        name_lines(axes, names, _COLOURS, ends)
    figure.axes[0].set_ylabel(f"score by {method}, %")
    figure.savefig(path, dpi=130)


def _plain_log(axes, budgets: Sequence[float]) -> None:
    """A logarithmic axis with ticks such as 200, 500, 1,000."""
    axes.set_xscale("log")
    known = [budget for budget in budgets if budget > 0] or [1]
    low, high = min(known), max(known)
    axes.set_xlim(low / 1.2, high * 1.2)
    wide = high / low > 100
    steps = [digit * 10**power for power in range(12) for digit in ((1,) if wide else (1, 2, 5))]
    ticks = [step for step in steps if low / 1.2 <= step <= high * 1.2]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_xticks([], minor=True)


def name_lines(
    axes, names: Sequence[str], colours: Sequence[str], ends: Sequence[tuple[Number, Number]]
) -> None:
    """Writes the names of lines in a column on the right of the axes, where they hide no point.

    Args:
      axes: matplotlib's; its limits are final.
      names: of the lines.
      colours: of the lines; there may be more.
      ends: (x, y) of the last point of each line, from which a dotted line leads to the name.
    """
    low, high = axes.get_ylim()
    heights = label_heights([y for _, y in ends], 0.06 * (high - low))
    for name, colour, end, height in zip(names, colours, ends, heights, strict=False):
        axes.annotate(
            name,
            end,
            (1.02, height),
            textcoords=axes.get_yaxis_transform(),
            color=colour,
            va="center",
            annotation_clip=False,
            arrowprops=dict(arrowstyle="-", color=colour, linestyle=":", shrinkA=0, shrinkB=4),
        )


def label_heights(ends: Sequence[Number], gap: Number) -> list[Number]:
    """Returns the height of each line's label: that of the line's end, or lower below another.

    Args:
      ends: height of the last point of each line.
      gap: the least distance between labels.

    # In: 90, 89, 20, gap 5  Out: [90, 85, 20]
    """
    heights: list[Number] = [0.0] * len(ends)
    above = float("inf")
    for index in sorted(range(len(ends)), key=lambda index: -ends[index]):
        above = heights[index] = min(ends[index], above - gap)
    return heights
