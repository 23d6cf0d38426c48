"""Searches the settings of the Hopper kernels, and writes them into their settings files.

- **decode**: every number of programs per core and of ring stages that fits in shared memory.
- **training**, **prompt**: every tile and number of tiles in flight that fits, for each head dim;
  results are compared.

All are compiled and timed by the profiler; the fastest is written, with the times of the others.

    python -m experiments.benchmarks.tune --kernel decode --out pallas_kernels/tuned
    python -m experiments.benchmarks.tune --kernel training --out pallas_kernels/tuned
"""

import concurrent.futures
import dataclasses
import functools
import itertools
import json
import os
import pathlib
import statistics
import sys
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from dms_jax.command_line.options import check_names
from dms_jax.command_line.reports import make_folder, write_json
from dms_jax.command_line.running import run
from experiments.benchmarks.timing import (
    chain_of,
    draw_pools,
    draw_queries,
    environment,
    require_gpu,
    time_chain,
    time_in_turns,
)
from pallas_kernels import tuned
from pallas_kernels.decode import cases
from pallas_kernels.decode import gpu as decode
from pallas_kernels.decode.cases import DecodeCase
from pallas_kernels.decode.plan import make_plan
from pallas_kernels.decode.rows import Rows
from pallas_kernels.dispatch import target_gpu
from pallas_kernels.prefill import gpu as prompt
from pallas_kernels.prefill.chunk import Chunk, Past
from pallas_kernels.shared_memory import REDUCTION_BYTES
from pallas_kernels.training import gpu_forward, gpu_key_gradient, gpu_query_gradient
from pallas_kernels.training.gpu_tiles import TILE, Problem, Ring, fits
from pallas_kernels.training.inputs import Inputs, Residuals

IMPLEMENTATION = "mosaic_gpu"


@dataclasses.dataclass(frozen=True)
class Config:
    """Tune a kernel for this device."""

    kernel: Literal["decode", "training", "prompt"] = "decode"
    """Kernel to tune."""
    cases: tuple[str, ...] = ()
    """Cases of decode to tune for, by name; all unless given."""
    out: pathlib.Path = pathlib.Path("runs/tuned")
    """Folder of the device's file; the library looks in pallas_kernels/tuned."""


# -- decode ----------------------------------------------------------------------------------------

_SHARED_BYTES = 227 * 1024
# Fewer bytes in flight per core cannot saturate the memory.
_LEAST_IN_FLIGHT = 32 * 1024


def choices_for(case: DecodeCase) -> list[dict[str, int]]:
    """Lists the settings with programs that fit on a core."""
    shape, pool = shape_of(case), (case.pages, case.page_size, case.head_dim)
    queries = jax.ShapeDtypeStruct((case.rows, case.group, case.head_dim), case.dtype)
    pages = jax.ShapeDtypeStruct(pool, case.pages_dtype or case.dtype)
    fitting = []
    for programs, stages in itertools.product((1, 2, 3), range(1, 6)):
        settings = {"programs_per_core": programs, "stages": stages}
        spec = decode.spec_of(
            queries,
            pages,
            settings,
            tile=decode.tile_of(IMPLEMENTATION, shape),
            programs=programs,
            scale=1.0,
            return_lse=False,
            return_scores=False,
        )
        in_flight = programs * stages * 2 * spec.tile * shape.head_dim * shape.itemsize
        fitted = programs * spec.shared_bytes <= _SHARED_BYTES
        enough = _LEAST_IN_FLIGHT <= in_flight <= 4 * _LEAST_IN_FLIGHT
        if fitted and (enough or stages == 1):
            fitting.append(settings)
    return fitting


def shape_of(case: DecodeCase) -> decode.Shape:
    """The key by which settings are selected."""
    dtype = case.pages_dtype or case.dtype
    return decode.Shape(case.rows, case.head_dim, case.page_size, case.columns, dtype)


def tune_decode(case: DecodeCase) -> dict[str, Any]:
    """Times all settings of one shape; returns the best entry, with all periods."""
    pools = draw_pools(case)
    lengths = jnp.asarray(case.lengths, jnp.int32)
    q = draw_queries(case, seed=1)
    choices, tile = choices_for(case), decode.tile_of(IMPLEMENTATION, shape_of(case))
    options = {"scale": case.head_dim**-0.5, "return_lse": False, "return_scores": False}

    def compiled(settings):
        programs = settings["programs_per_core"] * target_gpu().cores
        plan = make_plan(lengths, tile=tile, programs=programs)

        def call(q, pool, lengths, plan):
            k_pages, v_pages, table, k_scales, v_scales = pool
            rows = Rows(k_pages, v_pages, table, lengths, k_scales, v_scales)
            return decode.mosaic(q, rows, plan, **options, settings=settings)[0]

        return chain_of(call, q, pools, lengths, plan)

    with concurrent.futures.ThreadPoolExecutor(16) as threads:
        chains = list(threads.map(compiled, choices))
    periods = [time_chain(chain).period for chain in chains]
    ranking = sorted(range(len(choices)), key=periods.__getitem__)
    when = {
        "head_dim": case.head_dim,
        "page_size": case.page_size,
        "bytes": shape_of(case).itemsize,
        "tile": tile,
    }
    if case.name.endswith("small"):
        when["small"] = True
    return {
        "when": when,
        "use": choices[ranking[0]],
        "tried": [choices[i] | {"period_us": round(periods[i], 2)} for i in ranking],
    }


# -- training and prompts --------------------------------------------------------------------------

LENGTH, WINDOW, PAGE, ROUNDS = 8192, 512, 64, 7
KERNELS: dict[str, Any] = {
    "forward": gpu_forward.forward,
    "query_gradient": gpu_query_gradient.query_gradient,
    "key_gradient": gpu_key_gradient.key_gradients,
}
MODULES: dict[str, Any] = {
    "forward": gpu_forward,
    "query_gradient": gpu_query_gradient,
    "key_gradient": gpu_key_gradient,
    "prompt": prompt,
}


def problem_of(dim: int) -> Problem:
    """One sequence with the heads of an 8B model."""
    heads, kv_heads = (32, 8) if dim <= 128 else (16, 4)
    dtype = jnp.dtype(jnp.bfloat16)
    options = dict(packed=False, placed=False, interpret=False)
    return Problem(1, LENGTH, LENGTH, heads, kv_heads, dim, WINDOW, dim**-0.5, dtype, **options)


def rings_of(part: str, problem: Problem) -> list[Ring]:
    """Lists the rings that fit in shared memory and registers."""
    reductions = gpu_query_gradient.REDUCTIONS if part == "query_gradient" else REDUCTION_BYTES
    # The key gradients keep two tiles of scores and two of results in registers.
    wide_scores = part != "key_gradient" or problem.D <= 64
    blocks = (TILE,) if part == "prompt" else (64, 128) if wide_scores else (64,)
    rings = (Ring(block, stages) for block, stages in itertools.product(blocks, range(1, 7)))
    return [ring for ring in rings if fits(MODULES[part].scratch_of, problem, ring, reductions)]


def operands_of(part: str, problem: Problem) -> tuple:
    """Draws a kernel's arguments."""
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
        # Any log-sum-exp well above the scores works, because only the time matters.
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
    """Returns the kernel with this ring, as a function of the operands of `operands_of`."""
    if part == "prompt":
        options = {"window": WINDOW, "scale": problem.scale, "ring": ring}
        return functools.partial(prompt.prefill, **options)
    return functools.partial(KERNELS[part], problem, ring=ring)


def tune_ring(part: str, dim: int) -> dict[str, Any]:
    """Times all rings of one kernel; returns the best entry, with all times."""
    problem = problem_of(dim)
    operands = operands_of(part, problem)
    rings = rings_of(part, problem)

    def compiled(ring):
        return jax.jit(function_of(part, problem, ring)).lower(*operands).compile()

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        programs = list(threads.map(compiled, rings))
    results = [
        [np.asarray(x, np.float32) for x in jax.tree.leaves(run(*operands))] for run in programs
    ]
    for ring, other in zip(rings, results, strict=True):
        for got, want in zip(other, results[0], strict=True):
            error = np.linalg.norm(got - want) / np.linalg.norm(want)
            assert error < 1e-2, f"{part} with {ring} is off by {error}"
    calls = {str(i): (run, operands) for i, run in enumerate(programs)}
    medians = [
        statistics.median(max(duration for _, duration in launches) for launches in rounds)
        for rounds in time_in_turns(calls, ROUNDS).values()
    ]
    ranking = sorted(range(len(rings)), key=medians.__getitem__)
    return {
        "when": {"part": "forward" if part == "prompt" else part, "head_dim": dim},
        "use": vars(rings[ranking[0]]),
        "tried": [vars(rings[i]) | {"milliseconds": round(medians[i], 4)} for i in ranking],
    }


def save_settings(folder: pathlib.Path, kernel: str, entry: dict[str, Any]) -> None:
    """Writes an entry into this device's settings file, replacing one for the same shapes.

    Args:
      folder: the folder with the files of all devices.
      kernel: "operation/implementation".
      entry: see `pallas_kernels.tuned`; the settings tried are printed, not kept.
    """
    path = folder / tuned.file_name(jax.devices()[0].device_kind)
    report: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"kernels": {}}
    entries = {json.dumps(e["when"]): e for e in report["kernels"].get(kernel, [])}
    entries[json.dumps(entry["when"])] = {name: entry[name] for name in ("when", "use")}
    # The first applicable entry is taken, so entries for little work come first.
    report["kernels"][kernel] = sorted(entries.values(), key=lambda e: "small" not in e["when"])
    write_json(path, report | environment())


def main(config: Config) -> None:
    """Tunes every shape and writes the device's file, keeping the entries of other kernels."""
    known = [case.name for case in cases.TUNING] if config.kernel == "decode" else []
    check_names("--cases", config.cases, known)
    if config.kernel != "decode":  # keeps all programs of a kernel; jax has not started yet
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    require_gpu()
    make_folder("--out", config.out)

    def save(operation: str, what: str, entry: dict[str, Any]) -> None:
        print(what, *entry["tried"], sep="\n  ", flush=True)
        save_settings(config.out, f"{operation}/{IMPLEMENTATION}", entry)

    if config.kernel == "decode":
        for case in cases.TUNING:
            if case.name in (config.cases or known):
                save("decode_attention", case.name, tune_decode(case))
    elif config.kernel == "training":
        for part, dim in itertools.product(KERNELS, (64, 128, 256)):
            save("retrofit_attention", f"{part}, {dim}", tune_ring(part, dim))
    else:
        for dim in (64, 96, 128, 256):
            save("prefill_attention", f"prompt, {dim}", tune_ring("prompt", dim))


if __name__ == "__main__":
    sys.exit(run(main, Config, description=__doc__))
