"""Counts what a decode step launches on a GPU, and how long the device is busy with it.

A program of steps is profiled (jax's profiler) over the cache of `decode_steps`, and the trace is
read: kernels and copies a step and a layer, the share of the time in which at least one of them
runs, and the families of kernels that take longest. A profiler makes a step of many short kernels
longer, so its milliseconds without one stand beside them.

    python -m experiments.benchmarks.step_launches --shape llama-3.2-1b --batch 32
    python -m experiments.benchmarks.step_launches --shape qwen2.5-0.5b --batch 256 \
        --context 256 --ratio 1
"""

import collections
import dataclasses
import gzip
import json
import pathlib
import re
import sys
import tempfile
from typing import Any

import jax.numpy as jnp

import dms_jax
from dms_jax.command_line.reports import make_place
from dms_jax.command_line.running import run
from dms_jax.json_text import json_text
from experiments.benchmarks import decode_steps
from experiments.benchmarks.kernel_timing import command_line, environment
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
    dtype: str = "bfloat16"
    """Type of the weights and the cache."""
    out: pathlib.Path = pathlib.Path("runs/decode/step_launches.json")
    """JSON file for the figures."""


def device_events(folder: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the kernels and copies on a GPU in the profiler's trace, in order."""
    (path,) = folder.rglob("*.trace.json.gz")
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    names = {each["pid"]: each["args"]["name"] for each in events if each.get("name") == PROCESS}
    devices = {pid for pid, name in names.items() if "GPU" in name}
    kernels = [each for each in events if each.get("ph") == "X" and each["pid"] in devices]
    return sorted(kernels, key=lambda each: each["ts"])


PROCESS = "process_name"


def summarise(events: list[dict[str, Any]], steps: int, num_layers: int) -> dict[str, Any]:
    """Returns launches a step and a layer, the busy share, and the longest families.

    A kernel belongs to the layers if it runs at least once for each layer of each step.

    Args:
      events: kernels and copies of programs of decode steps, in order.
      steps: number of steps.
      num_layers: number of layers.
    """
    events = [each for each in events if each["args"].get("hlo_module", "").endswith("decode")]
    families = collections.defaultdict[str, list[float]](list)
    busy, end = 0.0, -1.0
    for each in events:
        families[family(each["name"])].append(each["dur"])
        start, stop = max(each["ts"], end), each["ts"] + each["dur"]
        busy, end = busy + max(0.0, stop - start), max(end, stop)
    span = end - events[0]["ts"] if events else 0.0
    in_layers = [len(each) for each in families.values() if len(each) >= steps * num_layers]
    longest = sorted(families.items(), key=lambda each: -sum(each[1]))[:20]
    return dict(
        launches_a_step=len(events) / steps,
        launches_a_layer=sum(in_layers) / (steps * num_layers),
        profiled_step_ms=1e-3 * span / steps,
        busy_ms=1e-3 * busy / steps,
        busy_share=busy / span if span else None,
        families=[
            dict(name=name, a_step=len(each) / steps, us_a_step=sum(each) / steps)
            for name, each in longest
        ],
    )


def family(name: str) -> str:
    """Returns the name of a kernel without its number, and of a product without its tiles.

    # In: loop_add_fusion_12_double_buffer_clone  Out: loop_add_fusion
    # In: nvjet_sm90_tst_64x40_64x16_2x4_h_badd_NNT  Out: nvjet_sm90_tst_h_badd_NNT
    """
    name = re.sub(r"_\d+x\d+", "", name.replace("_double_buffer_clone", ""))
    return re.sub(r"_\d+$", "", name)[:60]


def main(config: Config) -> dict[str, Any]:
    """Profiles a program of steps, and writes and returns the figures."""
    make_place("--out", config.out)
    steps = decode_steps.Config(
        batch=config.batch,
        context=config.context,
        chunk=config.chunk,
        repeats=config.repeats,
    )
    model = model_of(config.shape, jnp.dtype(config.dtype))
    lengths = decode_steps.row_lengths(steps, model, config.ratio)
    far = config.context - steps.window - 1
    evicted = 1 - (config.context / config.ratio - steps.window - 1) / far
    policy = (
        dms_jax.Vanilla()
        if config.ratio == 1
        else dms_jax.RandomEviction(window=steps.window, rate=evicted)
    )
    runner = decode_steps.filled_runner(steps, model, policy, lengths, config.ratio)
    with tempfile.TemporaryDirectory() as folder:
        profiled = dataclasses.replace(steps, profile=pathlib.Path(folder))
        seconds, _ = decode_steps.time_runner(profiled, runner)
        events = device_events(pathlib.Path(folder))
    figures = environment() | dict(
        command=command_line(),
        config={name: each for name, each in vars(config).items() if name != "out"},
        step_ms=1e3 * seconds,
        **summarise(events, config.chunk, model.config.num_layers),
    )
    config.out.write_text(json_text(figures, indent=1) + "\n", encoding="utf-8")
    print({key: figures[key] for key in ("step_ms", "launches_a_layer", "busy_ms", "busy_share")})
    return figures


if __name__ == "__main__":
    sys.exit(run(main, Config, description=__doc__))
