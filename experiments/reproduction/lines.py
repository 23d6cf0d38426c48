"""Figures of lines, each labelled where it ends. matplotlib is imported where it is used."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from dms_jax.checks import require

MOST_SERIES = 6
# Okabe and Ito's colours, which those who see few hues can tell apart; the last is for a baseline.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#555555")
_INK, _GRID = "#222222", "#dddddd"


@dataclasses.dataclass(frozen=True)
class Axes:
    """The axes of a figure of lines.

    Attributes:
      x, y: what they show.
      log_x, log_y: whether they are logarithmic.
      percent: whether y is a share from 0 to 1, drawn in percent.
    """

    x: str
    y: str
    log_x: bool = False
    log_y: bool = False
    percent: bool = False


def draw_lines(
    path: pathlib.Path,
    panels: Mapping[str, Mapping[str, tuple[np.ndarray, np.ndarray]]],
    axes: Axes,
    *,
    title: str,
) -> None:
    """Draws panels of lines side by side, each line labelled where it ends.

    A series has the same colour in every panel.

    Args:
      path: output file; the suffix decides the format.
      panels: (x, y) of each series by its label, by the title of the panel.
      axes: what the axes show.
      title: title of the figure.

    Raises:
      ConfigError: there are more series than can be told apart.
    """
    from matplotlib.figure import Figure

    labels = list(dict.fromkeys(label for panel in panels.values() for label in panel))
    require(
        len(labels) <= MOST_SERIES,
        f"A figure of lines can show {MOST_SERIES} series, not {len(labels)}: leave some out.",
    )
    colours = dict(zip(labels, _COLOURS, strict=False))
    figure = Figure(figsize=(5.2 * len(panels) + 0.8, 4), dpi=110, layout="constrained")
    figure.suptitle(title, fontsize=12, x=0.01, ha="left", color=_INK)
    grid = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    factor = 100 if axes.percent else 1
    for axis, (name, panel) in zip(grid, panels.items(), strict=True):
        for label, (x, y) in panel.items():
            axis.plot(x, factor * y, color=colours[label], linewidth=1.8)
        axis.set_xscale("log", base=2) if axes.log_x else None
        axis.set_yscale("log", base=2) if axes.log_y else None
        axis.set_xlabel(axes.x)
        axis.set_title(name if len(panels) > 1 else "", fontsize=10, color=_INK)
        axis.grid(color=_GRID, linewidth=0.6)
        axis.set_axisbelow(True)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
        for one in (axis.xaxis, axis.yaxis):
            one.set_major_formatter(lambda number, _: f"{number:g}")
    grid[0].set_ylabel(axes.y)
    if axes.percent:
        grid[0].set_ylim(-2, 102)
    for axis, panel in zip(grid, panels.values(), strict=True):
        _label_ends(axis, {label: (x, factor * y) for label, (x, y) in panel.items()},
                    colours)  # fmt: skip
    figure.savefig(path)


def _label_ends(axis: Any, panel: Mapping[str, Any], colours: Mapping[str, str]) -> None:
    """Writes each label to the right of all lines, as high as its own ends, and apart."""
    axis.figure.canvas.draw()  # limits are final
    low, high = axis.transAxes.transform([(0, 0), (0, 1)])[:, 1]
    gap = 17.0  # pixels, the height of a label
    points = {label: axis.transData.transform((x[-1], y[-1])) for label, (x, y) in panel.items()}
    # Beside the line that ends last: no line runs through a label.
    right = max(axis.transAxes.inverted().transform(point)[0] for point in points.values())
    ends = {label: point[1] for label, point in points.items()}
    order = sorted(ends, key=lambda label: ends[label])
    heights: list[float] = []
    for label in order:
        heights.append(max(ends[label], heights[-1] + gap if heights else low))
    for index in reversed(range(len(heights))):  # down again where they ran over the top
        above = heights[index + 1] - gap if index + 1 < len(heights) else high
        heights[index] = min(heights[index], above)
    for label, height in zip(order, heights, strict=True):
        axis.annotate(
            label,
            (right + 0.02, (height - low) / (high - low)),
            xycoords="axes fraction",
            va="center",
            fontsize=9,
            color=colours[label],
            annotation_clip=False,
        )
