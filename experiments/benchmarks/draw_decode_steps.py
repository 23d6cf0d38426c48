"""Draw the measured decode steps of `decode_steps.py`, each beside its own roofline.

python -m experiments.benchmarks.draw_decode_steps
"""

import dataclasses
import json
import pathlib
import sys
from typing import Any

import dms_jax
from dms_jax.command_line.reports import make_place
from dms_jax.command_line.running import run

FILES = ("decode_steps.json", "decode_steps_other_shapes.json")
# transformers takes many times as long: its bar ends at the edge, its number says how long it is.
WIDEST_MS = 19.0


@dataclasses.dataclass(frozen=True)
class Config:
    """Draw measured decode steps."""

    folder: pathlib.Path = pathlib.Path("experiments/results/speed")
    """Folder with the reports of `decode_steps`."""
    out: pathlib.Path = pathlib.Path("runs/decode/decode_steps.png")
    """PNG file for the picture."""


def main(config: Config) -> None:
    """Draw every row of the reports that a folder has."""
    make_place("--out", config.out)
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    paths = [config.folder / name for name in FILES]
    reports = [json.loads(path.read_text()) for path in paths if path.exists()]
    if not reports:
        raise dms_jax.ConfigError(
            f"--folder {config.folder}: there is no {' and no '.join(FILES)}."
        )
    rows = [row for report in reports for row in report["rows"]]
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    figure, axes = plt.subplots(
        len(shapes),
        1,
        figsize=(9, 1.9 * len(shapes) + 0.8),
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    for axis, shape in zip(axes[:, 0], shapes, strict=True):
        own = [row for row in rows if row["shape"] == shape]
        for place, row in enumerate(own):
            step = row["step_ms"]
            color = "tab:blue" if "ratio" in row else "tab:gray"
            axis.barh(place, min(step, WIDEST_MS), color=color, alpha=0.45)
            text = f"{step:.2f} ms"
            if "roofline_ms" in row:
                axis.barh(place, row["roofline_ms"], height=0.35, color=color)
                text += f", {row['share_of_roofline']:.0%} of its roofline"
            beyond = step > WIDEST_MS
            if beyond:
                break_bar(axis, place)
            axis.text(
                WIDEST_MS - 0.15 if beyond else step + 0.15,
                place,
                text,
                va="center",
                ha="right" if beyond else "left",
                fontsize=8,
            )
        axis.set_yticks(range(len(own)), [row["name"] for row in own], fontsize=8)
        axis.invert_yaxis()
        axis.set_title(shape, fontsize=9, loc="left")
        axis.set_xlim(0, WIDEST_MS)
    axes[-1, 0].set_xlabel(
        "ms a step; the narrow bar is the time to read weights and live cache once"
    )
    told = reports[0]["config"]
    figure.suptitle(
        f"Decode steps on {reports[0]['device']}: batch {told['batch']}, context "
        f"{told['context']}, {told['dtype']}, jax {reports[0]['versions']['jax']}",
        fontsize=10,
    )
    figure.savefig(config.out, dpi=110)


def break_bar(axis: Any, place: int) -> None:
    """Cuts a bar that goes on beyond the axis: two slanted lines, and white between them."""
    at, slant = 0.72 * WIDEST_MS, 0.12
    left, right = (([at + dx - slant, at + dx + slant]) for dx in (0, 0.35))
    edges = [place + 0.45, place - 0.45]
    axis.fill([*left, *right[::-1]], [*edges, *edges[::-1]], color="white", zorder=3)
    for line in (left, right):
        axis.plot(line, edges, color="#222222", linewidth=1, zorder=4)


if __name__ == "__main__":
    sys.exit(run(main, Config, description=__doc__))
