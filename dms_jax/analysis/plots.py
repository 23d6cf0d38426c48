"""Figures of the experiments. matplotlib is imported where it is used."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float


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
    kept: Float[np.ndarray, "L K"],
    *,
    title: str,
) -> None:
    """Draws loss against measured compression, pool bytes against tokens, and tokens kept per head.

    Args:
      path: output file; the suffix decides the format.
      points: all points of all methods.
      traces: (tokens generated, bytes of pages held) by label.
      kept: share of the tokens beyond the window that each head keeps.
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
                label=method,
            )
        axis.axhline(0, color="#222222", linewidth=0.8, linestyle=":")
        axis.set_xlabel(label + " (measured)")
        axis.set_ylabel("nats a token above dense")
        axis.set_yscale("symlog", linthresh=0.02)
        axis.set_yticks(
            [0, 0.01, 0.02, 0.05, 0.1, 0.2], ["0", "0.01", "0.02", "0.05", "0.1", "0.2"]
        )
        axis.legend(frameon=False, fontsize=9)
    memory, heads = axes[1]
    for label, (tokens, num_bytes) in traces.items():
        memory.plot(
            tokens,
            np.asarray(num_bytes) / 1e6,
            marker="o",
            markersize=3,
            color=_COLOURS.get(label.split(",")[0]),
            linestyle="--" if "held" in label else "-",
            label=label,
        )
    memory.set_xlabel("tokens per sequence")
    memory.set_ylabel("cache, MB")
    memory.set_ylim(bottom=0)
    memory.legend(frameon=False, fontsize=9)
    image = heads.imshow(100 * kept, cmap="Reds", vmin=0, vmax=100, aspect="auto")
    for (layer, head), share in np.ndenumerate(kept):
        heads.text(
            head,
            layer,
            f"{100 * share:.0f}%",
            ha="center",
            va="center",
            color="white" if share > 0.55 else "black",
        )
    heads.set_xticks(range(kept.shape[1]))
    heads.set_yticks(range(kept.shape[0]))
    heads.set_xlabel("KV head")
    heads.set_ylabel("layer")
    heads.set_title("tokens beyond the window that each head keeps", fontsize=10)
    figure.colorbar(image, ax=heads, label="%")
    figure.savefig(path, dpi=130)
