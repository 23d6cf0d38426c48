"""Time the write of a step's new keys and values into their pages on a GPU, and XLA's scatter.

Every implementation is checked bit by bit on fresh random data before it is timed, but for what is
rotated, which may differ from a rotation in float32 by one rounding to the pages' dtype. A chain of
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
from pallas_kernels import rotate_and_write, write_pages
from pallas_kernels.update import cases
from pallas_kernels.update.reference import rotated

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


def draw_rows(case: cases.WriteCase, key: jax.Array) -> dict[str, Any]:
    """Draw what one write brings, and where to."""
    keys = jax.random.split(key, 4)
    rows = {
        "pages": jax.random.permutation(keys[0], case.pages)[: case.rows].astype(jnp.int32),
        "offsets": jax.random.randint(keys[1], (case.rows,), 0, case.page_size),
    }
    if case.group:
        shape = (case.rows, case.group + 2, case.head_dim)
        rows["heads"] = jax.random.normal(keys[2], shape, jnp.dtype(case.dtype))
        shape = (case.rows // case.row_heads, case.head_dim // 2)
        angles = jax.random.uniform(keys[3], shape, minval=-3, maxval=3)
        return rows | {"rotation": (jnp.cos(angles), jnp.sin(angles))}
    for name, one in zip(("k", "v"), keys[2:], strict=True):
        shape = (case.rows, case.head_dim)
        rows[f"{name}_new"] = jax.random.normal(one, shape, jnp.bfloat16).astype(case.dtype)
        if case.scaled:
            rows[f"{name}_new_scales"] = jax.random.uniform(one, (case.rows,), minval=0.5, maxval=2)
    return rows


def written(pool: dict, rows: dict, implementation: str) -> dict:
    """The pool after one write, and the queries that were rotated with it."""
    if "heads" in rows:
        after = rotate_and_write(**pool, **rows, implementation=implementation)
        return dict(zip(("q", "k_pages", "v_pages"), after, strict=True))
    after = write_pages(**pool, **rows, implementation=implementation)
    names = ("k_pages", "v_pages", "k_scales", "v_scales")
    return dict(zip(names, after, strict=False))


def is_right(case: cases.WriteCase, implementation: str, key: jax.Array) -> bool:
    """Whether the slots named hold what is new, and all others what they held."""
    before, rows = draw_pool(case, key), draw_rows(case, jax.random.fold_in(key, 1))
    after = jax.jit(functools.partial(written, implementation=implementation))(before, rows)
    named = jnp.zeros((case.pages, case.page_size), bool)
    named = named.at[rows["pages"], rows["offsets"]].set(True)
    right = []
    if case.group:
        *queries, k_new, v_new = jnp.moveaxis(rotated(rows["heads"], rows["rotation"], ()), 1, 0)
        rows |= {"k_new": k_new, "v_new": v_new}
        right.append(_one_rounding(after["q"], jnp.stack(queries, axis=1)))
    for name in before:
        new = rows[name.replace("pages", "new").replace("scales", "new_scales")]
        old, got = before[name], after[name]
        here = got[rows["pages"], rows["offsets"]]
        is_rotated = case.group and name == "k_pages"
        right.append(_one_rounding(here, new) if is_rotated else (here == new).all())
        same = got == old
        right.append((same.all(-1) if same.ndim == 3 else same)[~named].all())
    return all(bool(x) for x in right)


def _one_rounding(got: jax.Array, want: jax.Array) -> jax.Array:
    """Whether numbers are the same, but for one rounding to their dtype."""
    apart = jnp.abs(got.astype(jnp.float32) - want.astype(jnp.float32))
    unit = float(jnp.finfo(want.dtype).eps)
    return (apart <= unit * jnp.abs(want.astype(jnp.float32)) + 1e-6).all()


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
            after = written(pool, rows, implementation)
            # Queries that nobody asks for would not be rotated by XLA.
            kept = jax.lax.optimization_barrier(after)
            pool = {name: kept[name] for name in pool}
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
