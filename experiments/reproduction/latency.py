"""Draw how much of a decode step is spent on reading the cache: figure 6 of the DMS paper.

    python -m experiments.reproduction.latency

Worked out by `dms_jax.analysis.latency` from data sheets, for the models of the paper and Qwen3 on
GPUs and TPUs, with the cache as it is and compressed 4 and 8 times. Lines are faint where weights
and cache do not fit the memory of one device. Beside the model, in the JSON file: decode steps that
this repository measured on an H200 (`experiments/results/decode`).
"""

import dataclasses
import datetime
import json
import pathlib
import sys
from typing import Any

import numpy as np

from dms_jax.analysis.latency import cache_bytes, step, weight_bytes
from dms_jax.command_line.reports import make_place, write_json
from dms_jax.command_line.running import command, run
from dms_jax.config import ModelConfig
from dms_jax.devices import DEVICES

NAMES = {"h100": "H100", "h200": "H200", "v5e": "TPU v5e", "v5p": "TPU v5p", "v6e": "TPU v6e"}
RATIOS = {1: "tab:gray", 4: "tab:orange", 8: "tab:blue"}
BATCHES: dict[int, Any] = {1: ":", 16: "--", 256: "-"}
PICTURED = ("Llama 3.1 8B", "Qwen2.5 32B")
DEVICES_PICTURED = ("h200", "v5p", "v6e")
_SHAPES = {  # V, E, F, L, H, K, D
    "Llama 3.2 1B": (128_256, 2048, 8192, 16, 32, 8, 64),
    "Llama 3.1 8B": (128_256, 4096, 14_336, 32, 32, 8, 128),
    "Qwen2.5 1.5B": (151_936, 1536, 8960, 28, 12, 2, 128),
    "Qwen2.5 7B": (152_064, 3584, 18_944, 28, 28, 4, 128),
    "Qwen2.5 32B": (152_064, 5120, 27_648, 64, 40, 8, 128),
    "Qwen3 8B": (151_936, 4096, 12_288, 36, 32, 8, 128),
}
_TIED = ("Llama 3.2 1B",)
_MEASURED = {
    "llama-3.1-8b": "Llama 3.1 8B",
    "llama-3.2-1b": "Llama 3.2 1B",
    "qwen3-8b": "Qwen3 8B",
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Draw how much of a decode step is spent on reading the cache."""

    longest: int = 131_072
    """Tokens a sequence at the right edge."""
    steps: pathlib.Path = pathlib.Path("experiments/results/decode")
    """Folder of the measured decode steps."""
    out: pathlib.Path = pathlib.Path("runs/latency")
    """Folder for latency.png and latency.json."""


def shapes() -> dict[str, ModelConfig]:
    """The models by name."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_layers")
    names += ("num_heads", "num_kv_heads", "head_dim")
    return {
        name: ModelConfig(
            **dict(zip(names, sizes, strict=True)),
            max_position_embeddings=131_072,
            tie_embeddings=name in _TIED,
        )
        for name, sizes in _SHAPES.items()
    }


def main(config: Config) -> dict[str, Any]:
    """Draws the figure and writes the numbers."""
    make_place("--out", config.out / "latency.png")
    tokens = np.unique(np.geomspace(256, config.longest, 64).astype(int))
    draw(config.out / "latency.png", tokens)
    data = {
        "command": command(without=("--out",)),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "data_sheets": {name: dataclasses.asdict(DEVICES[key]) for key, name in NAMES.items()},
        "share_of_the_cache": shares(tokens),
        "measured": measured(config.steps),
    }
    write_json(config.out / "latency.json", data)
    print(f"{config.out / 'latency.png'}, {config.out / 'latency.json'}")
    for row in data["measured"]:
        print(
            f"{row['model']}, {row['name']}: {row['measured_ms']:.2f} ms measured, "
            f"{row['modelled_ms']:.2f} ms modelled"
        )
    return data


def fits(shape: ModelConfig, device: str, batch: int, live: float) -> bool:
    """Whether weights and cache fit one device; untied, the input embedding is one more matrix."""
    embedding = 0 if shape.tie_embeddings else 2 * shape.vocab_size * shape.hidden_size
    held = weight_bytes(shape) + embedding + cache_bytes(shape, batch=batch, live_tokens=live)
    return held <= DEVICES[device].memory


def shares(tokens: np.ndarray) -> list[dict[str, Any]]:
    """The cache's share of a step at some lengths, as rows."""
    return [
        {
            "model": model,
            "device": NAMES[device],
            "batch": batch,
            "compression_ratio": ratio,
            "tokens": length,
            "share": round(found.cache_share, 4),
            "step_ms": round(1e3 * found.seconds, 4),
            "fits": fits(shape, device, batch, length / ratio),
        }
        for model, shape in shapes().items()
        for device in NAMES
        for batch in BATCHES
        for ratio in RATIOS
        for length in (8192, int(tokens[-1]))
        for found in [
            step(shape, DEVICES[device], tokens=length, batch=batch, compression_ratio=ratio)
        ]
    ]


def measured(folder: pathlib.Path) -> list[dict[str, Any]]:
    """Steps that were measured, beside the model's for the same live tokens; H200."""
    rows = []
    for path in sorted(folder.glob("decode_steps*.json")):
        report = json.loads(path.read_text())
        batch = int(report["config"]["batch"])
        for row in report["rows"]:
            if "live_tokens" not in row or row["shape"] not in _MEASURED:
                continue
            model = _MEASURED[row["shape"]]
            live = row["live_tokens"]
            found = step(shapes()[model], DEVICES["h200"], tokens=live, batch=batch)
            rows.append(
                {
                    "model": model,
                    "name": row["name"],
                    "device": report["device"],
                    "batch": batch,
                    "live_tokens": live,
                    "measured_ms": row["step_ms"],
                    "modelled_ms": 1e3 * found.seconds,
                    "share_of_the_cache": found.cache_share,
                }
            )
    return rows


def draw(path: pathlib.Path, tokens: np.ndarray) -> None:
    """Writes the figure: a row for each of two models, a column for each of three devices.

    latency.json has the other models, devices and batches.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    models = {name: shapes()[name] for name in PICTURED}
    figure = Figure(figsize=(12, 3.4 * len(models) + 0.6), layout="constrained")
    axes = figure.subplots(len(models), len(DEVICES_PICTURED), sharex=True, sharey=True)
    for line, (model, shape) in zip(axes, models.items(), strict=True):
        for axis, device in zip(line, DEVICES_PICTURED, strict=True):
            for ratio, color in RATIOS.items():
                for batch, style in BATCHES.items():
                    if batch > 1:
                        _draw_line(axis, shape, device, tokens, batch, ratio, color, style)
            axis.set_xscale("log", base=2)
            axis.set_ylim(0, 100)
            axis.set_xlim(tokens[0], tokens[-1])
            ticks = [2**power for power in range(8, 18, 3)]
            axis.set_xticks(ticks, [f"{t // 1024}K" if t >= 1024 else str(t) for t in ticks])
            axis.grid(alpha=0.3)
        line[0].set_ylabel(f"{model}\nreading the cache, % of the step")
    for axis, device in zip(axes[0], DEVICES_PICTURED, strict=True):
        axis.set_title(NAMES[device], fontsize=11)
    for axis in axes[-1]:
        axis.set_xlabel("tokens a sequence")
    handles = [
        Line2D([], [], color=color, label="whole cache" if ratio == 1 else f"{ratio}x fewer tokens")
        for ratio, color in RATIOS.items()
    ]
    handles += [
        Line2D([], [], color="black", linestyle=style, label=f"batch {batch}")
        for batch, style in BATCHES.items()
        if batch > 1
    ]
    handles.append(Line2D([], [], color="black", alpha=0.2, label="beyond one device's memory"))
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False)
    figure.savefig(path, dpi=110)


def _draw_line(
    axis: Any,
    shape: ModelConfig,
    device: str,
    tokens: np.ndarray,
    batch: int,
    ratio: int,
    color: str,
    style: str,
) -> None:
    percent = np.array(
        [
            100
            * step(
                shape, DEVICES[device], tokens=int(length), batch=batch, compression_ratio=ratio
            ).cache_share
            for length in tokens
        ]
    )
    inside = np.array([fits(shape, device, batch, length / ratio) for length in tokens])
    axis.plot(tokens, percent, color=color, linestyle=style, linewidth=1.2, alpha=0.2)
    axis.plot(
        tokens[inside], percent[inside], color=color, linestyle=style, linewidth=1.6, alpha=1.0
    )


if __name__ == "__main__":
    sys.exit(run(main, Config, description=__doc__))
