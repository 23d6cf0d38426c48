"""Figures of the experiments. matplotlib is imported where it is used."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float

from dms_jax.analysis.head_pictures import Scale, colours_of, show_map
from dms_jax.analysis.labels import label_heights


@dataclasses.dataclass(frozen=True)
class Point:
    """One method at one setting.

    Attributes:
      method: name of the method, which decides the colour.
      peak_ratio, reads_ratio: measured ratios of the dense cache to this one.
      increase: loss above the dense cache in nats per token.
      error: standard error of `increase`.
    """

    method: str
    peak_ratio: float
    reads_ratio: float
    increase: float
    error: float


_COLOURS = {
    "DMS": "#c0392b",
    "StreamingLLM": "#2471a3",
    "TOVA": "#7d8c2f",
    "random": "#909497",
    "dense": "#222222",
}


def compression_figure(
    path: pathlib.Path,
    points: Sequence[Point],
    traces: Mapping[str, tuple[Sequence[int], Sequence[float | int]]],
    ratios: Float[np.ndarray, "L K"],
    *,
    title: str,
) -> None:
    """Draws loss against measured compression, pool bytes against tokens, and ratios per head.

    Args:
      path: output file; the suffix decides the format.
      points: all points of all methods.
      traces: (tokens generated, bytes of pages held) by label.
      ratios: compression ratio of each head.
      title: title of the figure.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 7.2), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(2, 2)
    panels = (
        ("peak_ratio", "times fewer live tokens at the peak"),
        ("reads_ratio", "times fewer reads"),
    )
    for axis, (field, label) in zip(axes[0], panels, strict=True):
        for method in dict.fromkeys(point.method for point in points):
            own = sorted(
                (point for point in points if point.method == method),
                key=lambda point: getattr(point, field),
            )
            axis.errorbar(
                [getattr(point, field) for point in own],
                [point.increase for point in own],
                yerr=[point.error for point in own],
                marker="o",
                markersize=4,
                linewidth=1.4,
                capsize=2,
                color=_COLOURS.get(method),
            )
            axis.annotate(
                method,
                (getattr(own[-1], field), own[-1].increase),
                xytext=(6, 4),
                textcoords="offset points",
                fontsize=9,
                color=_COLOURS.get(method),
            )
        axis.margins(x=0.12)  # room for names
        axis.spines[["top", "right"]].set_visible(False)
        axis.axhline(0, color="#222222", linewidth=0.8, linestyle=":")
        axis.set_xlabel(label + " (measured)")
        axis.set_ylabel("nats a token above dense")
        axis.set_yscale("symlog", linthresh=0.02)
        axis.set_yticks(
            [0, 0.01, 0.02, 0.05, 0.1, 0.2], ["0", "0.01", "0.02", "0.05", "0.1", "0.2"]
        )
    memory, heads = axes[1]
    for label, (tokens, num_bytes) in traces.items():
        memory.plot(
            tokens,
            np.asarray(num_bytes) / 1e6,
            marker="o",
            markersize=3,
            color=_COLOURS.get(label.split(",")[0]),
            linestyle="--" if "held" in label else "-",
        )
    ends = [(tokens[-1], num_bytes[-1] / 1e6) for tokens, num_bytes in traces.values()]
    gap = 0.06 * max(height for _, height in ends)
    for label, (x, _), height in zip(
        traces, ends, label_heights(ends, gap, log=False), strict=True
    ):
        memory.annotate(
            label,
            (x, height),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=_COLOURS.get(label.split(",")[0]),
            annotation_clip=False,
        )
    memory.set_xlabel("tokens per sequence")
    memory.set_ylabel("cache, MB")
    memory.set_ylim(bottom=0)
    memory.spines[["top", "right"]].set_visible(False)
    scale = Scale("times fewer tokens")
    norm, colours = colours_of([ratios], scale)
    show_map(heads, ratios, scale, norm, colours)
    heads.set_xlabel("KV head")
    heads.set_ylabel("layer")
    heads.set_title("times fewer tokens that each head holds after the text", fontsize=10)
    figure.savefig(path, dpi=130)
