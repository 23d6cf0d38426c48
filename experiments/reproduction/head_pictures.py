"""Pictures of what heads keep: maps of layers and heads.

Colours are perceptually uniform (viridis), on a logarithmic scale for ratios; signed numbers have a
symmetric scale with two hues. matplotlib is imported where it is used.
"""

import dataclasses
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

_MOST_COLUMNS = 6
_INK = "#222222"


@dataclasses.dataclass(frozen=True)
class Scale:
    """How the numbers of a map become colours and text.

    Attributes:
      label: what the colours mean, beside the bar.
      kind: "ratio" (logarithmic, from 1), "share" (0 to 1) or "signed" (symmetric around 0).
      digits: digits after the point.
      rows, columns: what the axes are.
      row_names, column_names: names of their ticks; numbers if None.
    """

    label: str
    kind: Literal["ratio", "share", "signed"] = "ratio"
    digits: int = 1
    rows: str = "layer"
    columns: str = "KV head"
    row_names: Sequence[str] | None = None
    column_names: Sequence[str] | None = None


def draw_maps(
    path: pathlib.Path,
    maps: Mapping[str, Float[np.ndarray, "rows columns"]],
    scale: Scale,
    *,
    title: str,
    columns: int = _MOST_COLUMNS,
) -> None:
    """Draws maps side by side on one scale of colours, each number in its cell.

    Args:
      path: output file; the suffix decides the format.
      maps: numbers by the title of their panel; NaN is left white.
      scale: how numbers become colours.
      title: title of the figure.
      columns: panels in a row.
    """
    from matplotlib.figure import Figure

    shapes = [values.shape for values in maps.values()]
    columns = min(columns, len(maps))
    lines = -(-len(maps) // columns)
    width = max(max(shape[1] for shape in shapes) * 0.62, 1.5) + 0.75
    height = max(shape[0] for shape in shapes) * 0.34 + 0.95
    figure = Figure(figsize=(max(columns * width + 1.2, 6), lines * height + 0.8), dpi=110)
    figure.set_layout_engine("constrained")
    figure.suptitle(title, fontsize=12, x=0.01, ha="left", color=_INK)
    norm, colours = colours_of(list(maps.values()), scale)
    axes = figure.subplots(lines, columns, squeeze=False)
    for axis, (name, values) in zip(axes.flat, maps.items(), strict=False):
        show_map(axis, values, scale, norm, colours)
        axis.set_title(name, fontsize=10, color=_INK)
    for axis in axes.flat[len(maps) :]:
        axis.set_axis_off()
    for line in axes:
        line[0].set_ylabel(scale.rows)
    for axis in axes.flat[max(len(maps) - columns, 0) : len(maps)]:
        axis.set_xlabel(scale.columns)
    from matplotlib.cm import ScalarMappable

    bar = figure.colorbar(ScalarMappable(norm, colours), ax=axes, pad=0.01)
    bar.set_label(scale.label)
    _plain_ticks(bar, scale.kind, norm)
    figure.savefig(path)


def colours_of(maps: Sequence[np.ndarray], scale: Scale) -> tuple[Any, Any]:
    """Returns matplotlib's norm and colours for all the maps together."""
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm, Normalize

    numbers = np.concatenate([values[np.isfinite(values)] for values in maps])
    if scale.kind == "signed":
        most = max(float(np.abs(numbers).max(initial=0)), 1e-9)
        return Normalize(-most, most), colormaps["PuOr_r"]
    if scale.kind == "share":
        return Normalize(0, 1), colormaps["viridis"]
    return LogNorm(1, max(float(numbers.max(initial=1)), 2)), colormaps["viridis"]


def show_map(axis: Any, values: np.ndarray, scale: Scale, norm: Any, colours: Any) -> None:
    """Draws a map, each number in black or white, whichever has more contrast."""
    axis.imshow(values, cmap=colours, norm=norm, aspect="auto")
    for (row, column), number in np.ndenumerate(values):
        if not math.isfinite(number):
            continue
        red, green, blue = colours(norm(number))[:3]
        light = 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2
        text = f"{number:{'+' if scale.kind == 'signed' else ''}.{scale.digits}f}"
        axis.text(
            column,
            row,
            text if float(text) else "0",
            ha="center",
            va="center",
            fontsize=8,
            color="black" if light > 0.18 else "white",
        )
    for name, size, names in (
        ("x", values.shape[1], scale.column_names),
        ("y", values.shape[0], scale.row_names),
    ):
        labels = [str(index) for index in range(size)] if names is None else list(names)
        turned = name == "x" and max(map(len, labels)) > 5
        getattr(axis, f"set_{name}ticks")(range(size), labels, rotation=35 if turned else 0)
    axis.tick_params(length=0, labelsize=8)
    for spine in axis.spines.values():
        spine.set_visible(False)


def _plain_ticks(bar: Any, kind: str, norm: Any) -> None:
    """Labels a bar of ratios with plain numbers."""
    if kind != "ratio":
        return
    steps = [1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256, 512, 1024]
    ticks = [step for step in steps if step <= norm.vmax * 1.001]
    bar.set_ticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    bar.ax.minorticks_off()
