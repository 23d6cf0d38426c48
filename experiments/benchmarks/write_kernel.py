"""Time the write of a step's new keys and values into their pages on a GPU, and XLA's scatter.

Every implementation is checked bit by bit on fresh random data before it is timed. A chain of
writes runs in one program over a pool of several times the second-level cache, each write with
rows, pages and slots of its own; what counts is the time from a chain's first kernel to the end of
its last, divided by its writes.

    python -m experiments.benchmarks.write_kernel --out experiments/results/kernels
"""

import dataclasses
import functools
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp

from dms_jax.command_line.running import run
from experiments.benchmarks.kernel_timing import CALLS, measure_all, time_program
from pallas_kernels import write_pages
from pallas_kernels.update import cases

IMPLEMENTATIONS = ("xla", "mosaic_gpu")


def draw_pool(case: cases.WriteCase, key: jax.Array) -> dict[str, jax.Array]:
    """Draw the arrays that are written to."""
    pool = {}
    for name, one in zip(("k", "v"), jax.random.split(key), strict=True):
        shape = (case.pages, case.page_size, case.head_dim)
        pool[f"{name}_pages"] = jax.random.normal(one, shape, jnp.bfloat16).astype(case.dtype)
        if case.scaled:
            pool[f"{name}_scales"] = jax.random.uniform(one, shape[:2], minval=0.5, maxval=2)
    return pool


def draw_rows(case: cases.WriteCase, key: jax.Array) -> dict[str, jax.Array]:
    """Draw what one write brings, and where to."""
    keys = jax.random.split(key, 4)
    rows = {
        "pages": jax.random.permutation(keys[0], case.pages)[: case.rows].astype(jnp.int32),
        "offsets": jax.random.randint(keys[1], (case.rows,), 0, case.page_size),
    }
    for name, one in zip(("k", "v"), keys[2:], strict=True):
        shape = (case.rows, case.head_dim)
        rows[f"{name}_new"] = jax.random.normal(one, shape, jnp.bfloat16).astype(case.dtype)
        if case.scaled:
            rows[f"{name}_new_scales"] = jax.random.uniform(one, (case.rows,), minval=0.5, maxval=2)
    return rows


def written(pool: dict, rows: dict, implementation: str) -> dict:
    """The pool after one write."""
    after = write_pages(**pool, **rows, implementation=implementation)
    names = ("k_pages", "v_pages", "k_scales", "v_scales")
    return dict(zip(names, after, strict=False))


def is_right(case: cases.WriteCase, implementation: str, key: jax.Array) -> bool:
    """Whether the slots named hold what is new, bit by bit, and all others what they held."""
    before, rows = draw_pool(case, key), draw_rows(case, jax.random.fold_in(key, 1))
    after = jax.jit(functools.partial(written, implementation=implementation))(before, rows)
    named = jnp.zeros((case.pages, case.page_size), bool)
    named = named.at[rows["pages"], rows["offsets"]].set(True)
    right = []
    for name in before:
        new = rows[name.replace("pages", "new").replace("scales", "new_scales")]
        old, got = before[name], after[name]
        right.append((got[rows["pages"], rows["offsets"]] == new).all())
        same = got == old
        right.append((same.all(-1) if same.ndim == 3 else same)[~named].all())
    return all(bool(x) for x in right)


def measure(case: cases.WriteCase, implementation: str, seed: int) -> dict[str, Any]:
    """Check and time one implementation."""
    key = jax.random.key(seed)
    right = is_right(case, implementation, key)
    steps = [draw_rows(case, jax.random.fold_in(key, 2 + i)) for i in range(CALLS)]

    @functools.partial(jax.jit, donate_argnums=0)
    def chain(pool, steps):
        for rows in steps:
            # Nothing of a write is done before its turn.
            pool, rows = jax.lax.optimization_barrier((pool, rows))
            pool = written(pool, rows, implementation)
        return pool

    state = [draw_pool(case, key)]

    def run():
        state[0] = jax.block_until_ready(chain(state[0], steps))

    times = time_program(run)
    return {"right": right, "write_us": times.pop("span_us"), **times}


@dataclasses.dataclass(frozen=True)
class Config:
    """Time writes."""

    out: pathlib.Path = pathlib.Path("runs/kernels")
    """Folder for the figures, write.json."""


def main(config: Config) -> None:
    """Measure, print, and write the report."""
    measure_all(config.out / "write.json", cases.BENCHMARK, IMPLEMENTATIONS, measure)


if __name__ == "__main__":
    sys.exit(run(main, Config, description=__doc__))
