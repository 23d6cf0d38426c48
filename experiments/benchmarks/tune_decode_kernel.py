"""Search the settings of the Hopper decode kernel and write them where the kernel looks.

For every shape, every number of programs a core and stages of the ring that fits in shared memory
is compiled and timed; the shortest period wins.

    python -m experiments.benchmarks.tune_decode_kernel --out pallas_kernels/tuned
"""

import concurrent.futures
import dataclasses
import itertools
import pathlib
import sys

import jax
import jax.numpy as jnp

from dms_jax.command_line.options import check_names
from dms_jax.command_line.running import run
from experiments.benchmarks.kernel_timing import (
    chain_of,
    draw_pools,
    draw_queries,
    require_gpu,
    save_settings,
    time_chain,
)
from pallas_kernels.decode import cases, gpu
from pallas_kernels.decode.plan import make_plan
from pallas_kernels.decode.rows import Rows
from pallas_kernels.dispatch import target_gpu

IMPLEMENTATION = "mosaic_gpu"
KERNEL = f"decode_attention/{IMPLEMENTATION}"
_SHARED_BYTES = 227 * 1024
# Fewer bytes in flight on a core cannot keep the memory busy.
_LEAST_IN_FLIGHT = 32 * 1024


def choices_for(case) -> list[dict[str, int]]:
    """List the settings whose programs fit on a core."""
    shapes, shape = structs_of(case), shape_of(case)
    fitting = []
    for programs, stages in itertools.product((1, 2, 3), range(1, 6)):
        settings = {"programs_per_core": programs, "stages": stages}
        spec = gpu.spec_of(
            *shapes,
            settings,
            tile=gpu.tile_of(IMPLEMENTATION, shape),
            programs=programs,
            scale=1.0,
            return_lse=False,
            return_scores=False,
        )
        in_flight = programs * stages * 2 * spec.tile * shape.head_dim * shape.itemsize
        fits = programs * spec.shared_bytes <= _SHARED_BYTES
        enough = _LEAST_IN_FLIGHT <= in_flight <= 4 * _LEAST_IN_FLIGHT
        if fits and (enough or stages == 1):
            fitting.append(settings)
    return fitting


def shape_of(case) -> gpu.Shape:
    """What settings are chosen by."""
    dtype = case.pages_dtype or case.dtype
    return gpu.Shape(case.rows, case.head_dim, case.page_size, case.columns, dtype)


def structs_of(case):
    """Shapes of queries and pages."""
    pool = (case.pages, case.page_size, case.head_dim)
    return (
        jax.ShapeDtypeStruct((case.rows, case.group, case.head_dim), case.dtype),
        jax.ShapeDtypeStruct(pool, case.pages_dtype or case.dtype),
    )


def compile_chain(case, pools, lengths, q, settings):
    """Compile a chain of calls with these settings."""
    programs = settings["programs_per_core"] * target_gpu().cores
    plan = make_plan(lengths, tile=gpu.tile_of(IMPLEMENTATION, shape_of(case)), programs=programs)
    options = {"scale": case.head_dim**-0.5, "return_lse": False, "return_scores": False}

    def call(q, pool, lengths, plan):
        k_pages, v_pages, table, k_scales, v_scales = pool
        rows = Rows(k_pages, v_pages, table, lengths, k_scales, v_scales)
        return gpu.mosaic(q, rows, plan, **options, settings=settings)[0]

    return chain_of(call, q, pools, lengths, plan)


def tune(case) -> dict:
    """Time all settings of one shape; the entry of the best, with all periods beside it."""
    pools = draw_pools(case)
    lengths = jnp.asarray(case.lengths, jnp.int32)
    q = draw_queries(case, seed=1)
    choices = choices_for(case)
    with concurrent.futures.ThreadPoolExecutor(16) as threads:
        chains = list(threads.map(lambda c: compile_chain(case, pools, lengths, q, c), choices))
    periods = [time_chain(chain).period for chain in chains]
    ranking = sorted(range(len(choices)), key=periods.__getitem__)
    for i in ranking[:5]:
        print(f"{case.name:40s} {periods[i]:8.2f} us  {choices[i]}", flush=True)
    when = {
        "head_dim": case.head_dim,
        "page_size": case.page_size,
        "bytes": shape_of(case).itemsize,
        "tile": gpu.tile_of(IMPLEMENTATION, shape_of(case)),
    }
    if case.name.endswith("small"):
        when["small"] = True
    return {
        "when": when,
        "use": choices[ranking[0]],
        "tried": [choices[i] | {"period_us": round(periods[i], 2)} for i in ranking],
    }


@dataclasses.dataclass(frozen=True)
class Config:
    """Tune the decode kernel."""

    out: pathlib.Path = pathlib.Path("runs/tuned")
    """Folder of the device's file; the library looks in pallas_kernels/tuned."""
    cases: tuple[str, ...] = tuple(case.name for case in cases.TUNING)
    """Cases to tune for, by name; all unless given."""


def main(config: Config) -> None:
    """Tune every shape and write the device's file, keeping other kernels' entries."""
    check_names("--cases", config.cases, (case.name for case in cases.TUNING))
    require_gpu()
    for name in config.cases:
        save_settings(config.out, KERNEL, tune(cases.by_name(name)))


if __name__ == "__main__":
    sys.exit(run(main, Config, description=__doc__))
