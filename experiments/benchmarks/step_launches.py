"""Counts what a decode step launches on a GPU, and how long the device is busy with it.

A program of steps is profiled (jax's profiler) over the cache of `decode_steps`, and the trace is
read: kernels and copies a step and a layer, the share of the time in which at least one of them
runs, the families of kernels that take longest, the waits before them, and the calls of CUDA's
driver. A profiler makes a step of many short kernels longer, so its milliseconds without one, and
their share of the step's roofline (`decode_steps`), stand beside them.

    python -m experiments.benchmarks.step_launches --shape llama-3.2-1b --batch 32
    python -m experiments.benchmarks.step_launches --shape qwen2.5-0.5b --batch 256 \
        --context 256 --ratio 1
"""

import collections
import dataclasses
import pathlib
import sys
import tempfile
from typing import Any, Literal

import jax.numpy as jnp

from dms_jax.command_line.reports import make_place
from dms_jax.command_line.running import run
from dms_jax.json_text import json_text
from experiments.benchmarks import decode_steps, traces
from experiments.benchmarks.kernel_timing import command_line, environment
from experiments.benchmarks.settings import check_numbers
from experiments.benchmarks.shapes import Shape, model_of


@dataclasses.dataclass(frozen=True)
class Config:
    """Count the launches of a decode step."""

    shape: Shape = "llama-3.2-1b"
    """Model whose shape is profiled, with random weights."""
    batch: int = 32
    """Sequences that are decoded at a time."""
    context: int = 8192
    """Tokens that each sequence has seen."""
    ratio: int = 8
    """Compression ratio of the live tokens; 1 is the plain cache."""
    chunk: int = 32
    """Decode steps per compiled program."""
    repeats: int = 3
    """Programs that are timed without the profiler; the median counts."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the weights and the cache."""
    out: pathlib.Path = pathlib.Path("runs/decode/step_launches.json")
    """JSON file for the figures."""

    def __post_init__(self):
        check_numbers(self)


def launches_a_layer(kernels: list[dict[str, Any]], steps: int, num_layers: int) -> float:
    """Returns the launches of a layer: of kernels that run at least once in each of each step."""
    counts = collections.Counter(traces.family(each["name"]) for each in kernels)
    return sum(n for n in counts.values() if n >= steps * num_layers) / (steps * num_layers)


def main(config: Config) -> dict[str, Any]:
    """Profiles a program of steps, and writes and returns the figures."""
    make_place("--out", config.out)
    steps = decode_steps.Config(
        batch=config.batch,
        context=config.context,
        chunk=config.chunk,
        repeats=config.repeats,
        ratios=(config.ratio,),
    )
    model = model_of(config.shape, jnp.dtype(config.dtype))
    rate = decode_steps.read_rate()
    with tempfile.TemporaryDirectory() as folder:
        profiled = dataclasses.replace(steps, profile=pathlib.Path(folder))
        times = decode_steps.time_paged(profiled, model, config.ratio, rate)
        trace = traces.read(pathlib.Path(folder))
    kernels = trace.of("decode")
    figures = environment() | dict(
        command=command_line(),
        config={name: each for name, each in vars(config).items() if name != "out"},
        read_rate=rate,
        **times,
        launches_a_layer=launches_a_layer(kernels, config.chunk, model.config.num_layers),
        calls_a_step={name: count / config.chunk for name, count in trace.calls.items()},
        profiled_step=traces.summarise(kernels, config.chunk),
    )
    config.out.write_text(json_text(figures, indent=1) + "\n", encoding="utf-8")
    print({key: figures[key] for key in ("step_ms", "share_of_roofline", "launches_a_layer")})
    return figures


if __name__ == "__main__":
    sys.exit(run(main, Config, description=__doc__))
