"""Times the update of a training step alone: norm, clipping, AdamW and what keeps a bad step out.

The library's update is what Optax says, and the compiler joins it: the least that it can move are
32 bytes a trained parameter, with everything in float32. The gradient is read for its norm and
again for the update (8), and parameters and both moments are read and written (24). Beside the
milliseconds stand those that this many bytes take at the rate at which the device reads.

    python -m experiments.benchmarks.optimizer_update --out runs/optimizer_update.json
"""

import dataclasses
import pathlib
import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp

import dms_jax
from dms_jax.command_line.reports import make_place
from dms_jax.command_line.running import command, run
from dms_jax.json_text import json_text
from dms_jax.training import xla_options
from dms_jax.training.parameters import parameters
from dms_jax.training.recipe import Recipe, Stage
from dms_jax.training.step import ScheduleValues, TrainState, apply_gradient, make_optimizer
from experiments.benchmarks.decode_steps import read_rate
from experiments.benchmarks.kernel_timing import environment
from experiments.benchmarks.settings import check_numbers
from experiments.benchmarks.training import SHAPES

LEAST_BYTES = 32  # a parameter
CALLS_A_ROUND = 5


@dataclasses.dataclass(frozen=True)
class Config:
    """Time the update of all weights of a model."""

    shapes: tuple[str, ...] = ("llama-3.2-1b", "qwen2.5-0.5b")
    """Names of `benchmarks.training.SHAPES`."""
    rounds: int = 5
    """Rounds of five updates of which the median counts."""
    out: pathlib.Path = pathlib.Path("runs/optimizer_update.json")
    """Where the figures go, as they come."""

    def __post_init__(self):
        check_numbers(self)


def time_update(shape: str, rounds: int) -> dict[str, Any]:
    """Returns the milliseconds of an update, the kernels that the compiler made, and its size."""
    stages = (Stage("train", 1, 1e-5),)
    recipe = Recipe(name="update", stages=stages, trainable="all", sequence_length=1, batch_size=1)
    transformer = dms_jax.initialize(SHAPES[shape], dtype="float32").transformer
    arrays = parameters(transformer)
    optimizer = jax.jit(make_optimizer(recipe).init)(arrays)
    state = TrainState(jnp.zeros((), jnp.int32), arrays, optimizer)
    gradient = jax.tree.map(lambda x: 1e-3 * x, arrays)
    rate = jnp.float32(1e-5)
    schedule = dict(
        target=jnp.float32(0),
        neuron_scale=None,
        learning_rate=rate,
        adapter_learning_rate=rate,
        key=jax.random.key(0),
    )
    update = jax.jit(
        lambda state, gradient, loss, schedule: apply_gradient(
            recipe, state, gradient, loss, ScheduleValues(**schedule)
        ),
        donate_argnums=0,
        compiler_options=xla_options.compiler_options(jax.devices()[:1]),
    )
    loss = jnp.float32(1.0)
    compiled = update.lower(state, gradient, loss, schedule).compile()

    def round_of_calls(state: TrainState) -> tuple[TrainState, float]:
        began = time.perf_counter()
        for _ in range(CALLS_A_ROUND):
            state, _, finite = compiled(state, gradient, loss, schedule)
        assert bool(finite)
        return state, (time.perf_counter() - began) / CALLS_A_ROUND

    state, _ = round_of_calls(state)
    seconds = []
    for _ in range(rounds):
        state, taken = round_of_calls(state)
        seconds.append(taken)
    count = sum(x.size for x in arrays.values())
    text = compiled.as_text() or ""
    return dict(
        shape=shape,
        parameters=count,
        arrays=len(arrays),
        fusions=text.count(" fusion("),
        ms=round(1e3 * statistics.median(seconds), 3),
        all_ms=[round(1e3 * each, 3) for each in seconds],
        least_bytes=LEAST_BYTES * count,
    )


def main(config: Config) -> list[dict[str, Any]]:
    """Times every shape, writes the figures as they come, and returns them.

    Raises:
      ConfigError: there is no such shape.
    """
    if unknown := [shape for shape in config.shapes if shape not in SHAPES]:
        raise dms_jax.ConfigError(f"--shapes {' '.join(unknown)}: there are {', '.join(SHAPES)}.")
    make_place("--out", config.out)
    rows: list[dict[str, Any]] = []
    rate = read_rate()
    report = environment() | dict(command=command(), read_gb_a_second=rate / 1e9, rows=rows)
    for shape in config.shapes:
        row = time_update(shape, config.rounds)
        row["limit_ms"] = round(1e3 * row["least_bytes"] / rate, 3)
        rows.append(row)
        print(row, flush=True)
        config.out.write_text(json_text(report, indent=1) + "\n", encoding="utf-8")
    return rows


if __name__ == "__main__":
    sys.exit(run(main, Config, description=__doc__))
