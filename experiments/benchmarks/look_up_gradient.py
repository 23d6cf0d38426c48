"""Times forms of the gradient of an embedding table on a GPU.

product      with a one-hot matrix, a piece of the tokens at a time (`layers.look_up`)
blocks       of a block of tokens, equal ones are summed by a small product, and the first of
             them adds the sum to its row: the order is fixed, and no one-hot matrix is as wide
             as the vocabulary
scatter      adds row by row, in no fixed order

python -m experiments.benchmarks.look_up_gradient --out runs/look_up.json
"""

import dataclasses
import pathlib
import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dms_jax.command_line.reports import make_place
from dms_jax.command_line.running import command, run
from dms_jax.json_text import json_text
from dms_jax.model import layers
from experiments.benchmarks.kernel_timing import environment
from experiments.benchmarks.settings import check_numbers

# Vocabulary, columns, tokens.
SHAPES = {
    "llama-3.2-1b": (128256, 2048, 16384),
    "qwen2.5-0.5b": (151936, 896, 16384),
    "llama-3.1-8b": (128256, 4096, 8192),
    "tiny": (64, 8, 32),
}


def _scatter(tokens: jax.Array, gradient: jax.Array, size: int) -> jax.Array:
    wide = gradient.astype(jnp.promote_types(gradient.dtype, jnp.float32))
    return jnp.zeros((size, gradient.shape[-1]), wide.dtype).at[tokens].add(wide)


FORMS = {
    "product": layers._sum_by_product,
    "blocks": layers._sum_by_blocks,
    "scatter": _scatter,
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Time the gradient of an embedding table."""

    shapes: tuple[str, ...] = ("llama-3.2-1b", "qwen2.5-0.5b", "llama-3.1-8b")
    """Names of `SHAPES`."""
    calls: int = 10
    """Calls of which the median counts."""
    seconds: float = 60
    """After which nothing more is begun."""
    out: pathlib.Path = pathlib.Path("runs/look_up.json")
    """Where the figures go, as they come."""

    def __post_init__(self):
        check_numbers(self)


def draw(size: int, columns: int, count: int) -> tuple[jax.Array, jax.Array]:
    """Returns tokens, and a gradient of each."""
    # Few tokens are most of a text.
    drawn = np.random.default_rng(0).zipf(1.2, (2, count // 2)) - 1
    tokens = jnp.asarray(np.minimum(drawn, size - 1), jnp.int32)
    # Drawn in bfloat16 there are 128 values, whose sums are exact in any order.
    gradient = jax.random.normal(jax.random.key(0), (*tokens.shape, columns))
    return tokens, gradient.astype(jnp.bfloat16)


def time_form(form: Any, tokens: jax.Array, gradient: jax.Array, size: int, calls: int) -> Any:
    """Returns the milliseconds of a call, whether it repeats its bits, and its result."""
    compiled = jax.jit(form, static_argnums=2)
    first = jax.block_until_ready(compiled(tokens, gradient, size))
    times, same = [], True
    for _ in range(calls):
        began = time.perf_counter()
        again = jax.block_until_ready(compiled(tokens, gradient, size))
        times.append(1e3 * (time.perf_counter() - began))
        same = same and bool((first == again).all())
    return statistics.median(times), same, first


def main(config: Config) -> list[dict[str, Any]]:
    """Times every form, writes the figures as they come, and returns them."""
    make_place("--out", config.out)
    rows: list[dict[str, Any]] = []
    report = environment() | dict(command=command(), rows=rows)
    began = time.perf_counter()
    for name in config.shapes:
        size, columns, count = SHAPES[name]
        tokens, gradient = draw(size, columns, count)
        expected = None
        for form, function in FORMS.items():
            if time.perf_counter() - began > config.seconds:
                break
            ms, same, result = time_form(function, tokens, gradient, size, config.calls)
            expected = result if expected is None else expected
            off = float(jnp.abs(result - expected).max() / jnp.abs(expected).max())
            rows.append(
                dict(shape=name, form=form, ms=round(ms, 3), repeats_its_bits=same, off=off)
            )
            print(rows[-1], flush=True)
            config.out.write_text(json_text(report, indent=1) + "\n", encoding="utf-8")
    return rows


if __name__ == "__main__":
    sys.exit(run(main, Config, description=__doc__))
