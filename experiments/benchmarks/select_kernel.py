"""Time the selection of the largest scores of each row on a GPU, and XLA's two sorts.

Every implementation is checked against NumPy on fresh random scores before it is timed. A chain of
selections runs in one program, each over scores of its own; what counts is the time from a chain's
first kernel to the end of its last, divided by its selections.

    python -m experiments.benchmarks.select_kernel --out experiments/results/kernels
"""

import dataclasses
import functools
import pathlib
import sys
from typing import Any

import jax
import numpy as np

from dms_jax.command_line.running import run
from experiments.benchmarks.kernel_timing import CALLS, measure_all, time_program
from pallas_kernels import select_largest
from pallas_kernels.select import cases

IMPLEMENTATIONS = ("xla", "mosaic_gpu")


def is_right(scores: jax.Array, got: jax.Array, count: int) -> bool:
    """Whether these are the largest by a stable sort, in the order of their places."""
    ranked = np.argsort(-np.asarray(scores), axis=-1, kind="stable")
    return bool((np.sort(ranked[:, :count], -1) == got).all())


def measure(case: cases.SelectCase, implementation: str, seed: int) -> dict[str, Any]:
    """Check and time one implementation."""
    draw = jax.jit(lambda key: jax.random.normal(key, (case.rows, case.width), case.dtype))
    keys = jax.random.split(jax.random.key(seed), CALLS)
    steps = [draw(key) for key in keys]
    select = functools.partial(select_largest, count=case.count, implementation=implementation)
    right = is_right(steps[0], jax.jit(select)(steps[0]), case.count)

    @jax.jit
    def chain(steps):
        found = []
        for scores in steps:
            # Nothing of a selection is done before its turn.
            scores, found = jax.lax.optimization_barrier((scores, found))
            found.append(select(scores))
        return found

    def run():
        jax.block_until_ready(chain(steps))

    times = time_program(run)
    sizes = {"rows": case.rows, "width": case.width, "count": case.count}
    return sizes | {"right": right, "select_us": times.pop("span_us"), **times}


@dataclasses.dataclass(frozen=True)
class Config:
    """Time selections."""

    out: pathlib.Path = pathlib.Path("runs/kernels")
    """Folder for the figures, select.json."""
    only: tuple[str, ...] = IMPLEMENTATIONS
    """Implementations to time; both unless given."""


def main(config: Config) -> None:
    """Measure, print, and write the report."""
    measure_all(config.out / "select.json", cases.BENCHMARK, config.only, measure)


if __name__ == "__main__":
    sys.exit(run(main, Config, description=__doc__))
