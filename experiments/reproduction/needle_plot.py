"""The picture of needle grids: depth against length, a panel for each policy."""

import pathlib
from collections.abc import Mapping

from dms_jax.errors import ConfigError
from experiments.reproduction.needle_cells import NeedleGrid

_COLOURS = "cividis"  # dark is low and bright is high, for every kind of colour vision and in grey
_BRIGHT = 0.55  # above it the numbers are black


def needle_figure(
    path: str | pathlib.Path, grids: Mapping[str, NeedleGrid], *, title: str = ""
) -> None:
    """Draws the scores of grids side by side, as colours and as numbers in percent.

    Args:
      path: output file; the suffix decides the format.
      grids: grids of the same lengths and depths, by the labels of their panels.
      title: title of the figure; what was hidden where unless given.

    Raises:
      ConfigError: there is no grid, or their lengths or depths differ.
    """
    from matplotlib.figure import Figure

    shapes = {(grid.lengths, grid.depths) for grid in grids.values()}
    if len(shapes) != 1:
        raise ConfigError("needle_figure wants grids of the same lengths and depths, at least one.")
    ((lengths, depths),) = shapes
    first = next(iter(grids.values()))
    width, height = 0.9 + 0.72 * len(lengths), 1.6 + 0.46 * len(depths)
    figure = Figure(figsize=(max(width, 2.6) * len(grids) + 1.2, height), layout="constrained")
    task = first.result.settings["task"][0]["task"]
    figure.suptitle(
        title or f"{task}: needles found, in percent of {first.count} at each place", fontsize=11
    )
    panels = figure.subplots(1, len(grids), squeeze=False, sharey=True)[0]
    images = []
    for axis, (label, grid) in zip(panels, grids.items(), strict=True):
        shown = 100 * grid.scores
        images.append(axis.imshow(shown, cmap=_COLOURS, vmin=0, vmax=100, aspect="auto"))
        for row in range(len(depths)):
            for column in range(len(lengths)):
                score = grid.scores[row, column]
                axis.text(
                    column,
                    row,
                    f"{100 * score:.0f}",
                    ha="center",
                    va="center",
                    fontsize=9,
                    color="black" if score > _BRIGHT else "white",
                )
        axis.set_title(f"{label}\nmean {100 * grid.accuracy:.0f}", fontsize=10)
        axis.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], fontsize=9)
        axis.set_yticks(range(len(depths)), [f"{depth:g}%" for depth in depths], fontsize=9)
        axis.set_xlabel("length, tokens")
        axis.tick_params(length=0)
        for side in axis.spines.values():
            side.set_visible(False)
    panels[0].set_ylabel("depth of the needle")
    figure.colorbar(images[0], ax=list(panels), label="found, %", shrink=0.9)
    figure.savefig(path, dpi=140)
