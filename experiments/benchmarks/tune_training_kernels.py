"""Search how the Hopper kernels of training and prompts stream tiles, and write it down.

For every kernel and head dim, every tile and number of tiles in flight that fits in shared memory
is compiled, compared with the others' results, and timed by the profiler; the fastest wins.

    python -m experiments.benchmarks.tune_training_kernels --out pallas_kernels/tuned
"""

import concurrent.futures
import dataclasses
import functools
import itertools
import os
import pathlib
import statistics
import sys
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import profiler

from dms_jax.command_line.options import check_names
from dms_jax.command_line.running import run
from experiments.benchmarks.kernel_timing import require_gpu, save_settings
from pallas_kernels.prefill import gpu as prompt
from pallas_kernels.prefill.chunk import Chunk, Past
from pallas_kernels.shared_memory import REDUCTION_BYTES
from pallas_kernels.training import gpu_forward, gpu_key_gradient, gpu_query_gradient
from pallas_kernels.training.gpu_tiles import TILE, Problem, Ring, fits
from pallas_kernels.training.inputs import Inputs, Residuals

LENGTH, WINDOW, PAGE, ROUNDS = 8192, 512, 64, 7
TRAINING, PROMPT = "retrofit_attention/mosaic_gpu", "prefill_attention/mosaic_gpu"
KERNELS = {
    "forward": (TRAINING, (64, 128, 256)),
    "query_gradient": (TRAINING, (64, 128, 256)),
    "key_gradient": (TRAINING, (64, 128, 256)),
    "prompt": (PROMPT, (64, 96, 128, 256)),
}


def problem_of(dim: int) -> Problem:
    """One sequence with the heads of an 8B model."""
    heads, kv_heads = (32, 8) if dim <= 128 else (16, 4)
    dtype = jnp.dtype(jnp.bfloat16)
    options = dict(packed=False, placed=False, interpret=False)
    return Problem(1, LENGTH, LENGTH, heads, kv_heads, dim, WINDOW, dim**-0.5, dtype, **options)


def rings_of(part: str, problem: Problem) -> list[Ring]:
    """List the rings worth a try: those that fit, in shared memory and in registers."""
    kernel = {
        "forward": gpu_forward,
        "query_gradient": gpu_query_gradient,
        "key_gradient": gpu_key_gradient,
        "prompt": prompt,
    }[part]
    reductions = gpu_query_gradient.REDUCTIONS if part == "query_gradient" else REDUCTION_BYTES
    # The key gradients keep two tiles of scores and two of results in registers.
    wide_scores = part != "key_gradient" or problem.D <= 64
    blocks = (TILE,) if part == "prompt" else (64, 128) if wide_scores else (64,)
    rings = (Ring(block, stages) for block, stages in itertools.product(blocks, range(1, 7)))
    return [ring for ring in rings if fits(kernel.scratch_of, problem, ring, reductions)]


def operands_of(part: str, problem: Problem) -> tuple:
    """Draw a kernel's arguments."""
    keys = iter(jax.random.split(jax.random.key(0), 8))

    def normal(*shape, dtype=jnp.bfloat16):
        return jax.random.normal(next(keys), shape, dtype)

    batch, length, dim = problem.B, problem.T, problem.D
    q = normal(batch, length, problem.H, dim)
    k, v = (normal(batch, length, problem.K, dim) for _ in range(2))
    bias = jax.nn.log_sigmoid(normal(batch, problem.K, length, dtype=jnp.float32))
    if part == "forward":
        return (Inputs(q, k, v, bias),)
    if part != "prompt":
        # Any log-sum-exp well above the scores will do: only the time counts.
        minus_lse = jnp.full((batch, problem.H, length), -10.0) / problem.scale
        residuals = Residuals(normal(*q.shape), minus_lse, jnp.zeros_like(minus_lse))
        return Inputs(q, k, v, bias), residuals
    columns = length // PAGE
    pages = problem.K * columns
    table = jax.random.permutation(next(keys), pages).reshape(1, problem.K, columns)
    evicted = jax.random.bernoulli(next(keys), 0.75, (1, problem.K, 2048))
    chunk = Chunk(k[:, :2048], v[:, :2048], evicted, jnp.full(1, 2048))
    past = Past(
        normal(pages, PAGE, dim),
        normal(pages, PAGE, dim),
        table,
        jnp.full((1, problem.K), length),
        jnp.full((1, problem.K, length), 2**30),
    )
    return q[:, :2048], chunk, past


def function_of(part: str, problem: Problem, ring: Ring):
    """Return the kernel with this ring, of the operands of `operands_of`."""
    if part == "prompt":
        options = {"window": WINDOW, "scale": problem.scale, "ring": ring}
        return functools.partial(prompt.prefill, **options)
    kernel = {
        "forward": gpu_forward.forward,
        "query_gradient": gpu_query_gradient.query_gradient,
        "key_gradient": gpu_key_gradient.key_gradients,
    }[part]
    return functools.partial(kernel, problem, ring=ring)


def tune(part: str, dim: int) -> dict:
    """Time all rings of one kernel; the entry of the best, with all times beside it."""
    problem = problem_of(dim)
    operands = operands_of(part, problem)
    rings = rings_of(part, problem)

    def compile_one(ring):
        return jax.jit(function_of(part, problem, ring)).lower(*operands).compile()

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        compiled = list(threads.map(compile_one, rings))
    results = [
        [np.asarray(x, np.float32) for x in jax.tree.leaves(run(*operands))] for run in compiled
    ]
    for ring, other in zip(rings, results, strict=True):
        for got, want in zip(other, results[0], strict=True):
            error = np.linalg.norm(got - want) / np.linalg.norm(want)
            assert error < 1e-2, f"{part} with {ring} is off by {error}"
    times = [[] for _ in rings]
    for _, index in itertools.product(range(ROUNDS), range(len(rings))):
        timer = profiler.Cupti(finalize=False).measure(compiled[index], aggregate=False)
        launches: Any = timer(*operands)[1]
        times[index].append(max(duration for _, duration in launches))
    medians = [statistics.median(x) for x in times]
    ranking = sorted(range(len(rings)), key=medians.__getitem__)
    tried = [vars(rings[i]) | {"milliseconds": round(medians[i], 4)} for i in ranking]
    print(part, dim, *tried, sep="\n  ", flush=True)
    part = "forward" if part == "prompt" else part
    when = {"part": part, "head_dim": dim}
    return {"when": when, "use": vars(rings[ranking[0]]), "tried": tried}


@dataclasses.dataclass(frozen=True)
class Config:
    """Tune the kernels of training and prompts."""

    out: pathlib.Path = pathlib.Path("runs/tuned")
    """Folder of the device's file; the library looks in pallas_kernels/tuned."""
    kernels: tuple[str, ...] = tuple(KERNELS)
    """Kernels to tune: forward, query_gradient, key_gradient, prompt."""


def main(config: Config) -> None:
    """Tune every kernel and write the device's file, keeping other kernels' entries."""
    check_names("--kernels", config.kernels, KERNELS)
    require_gpu()
    for part in config.kernels:
        kernel, dims = KERNELS[part]
        for dim in dims:
            save_settings(config.out, kernel, tune(part, dim))


if __name__ == "__main__":
    sys.exit(run(main, Config, description=__doc__))
