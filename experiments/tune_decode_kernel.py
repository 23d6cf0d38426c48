"""Search the settings of the Hopper decode kernel and write them where the kernel looks.

For every shape, every number of programs a core and stages of the ring that fits in shared memory
is compiled and timed; the shortest period wins.

    python experiments/tune_decode_kernel.py --out pallas_kernels/tuned
"""

import argparse
import concurrent.futures
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
from kernel_timing import CALLS, draw_pools, environment, time_chain

from pallas_kernels import tuned
from pallas_kernels.decode import cases, gpu
from pallas_kernels.decode.plan import make_plan
from pallas_kernels.dispatch import target_gpu

KERNEL = "decode_attention/mosaic_gpu"
_CHOICES = [(1, stages) for stages in range(1, 9)] + [(2, stages) for stages in range(1, 7)]
_CHOICES += [(3, 1), (3, 2), (3, 3), (4, 2)]


def choices_for(case) -> list[tuple[int, int]]:
    """List (programs a core, stages) that fit, fewest bytes in flight first left out."""
    page = 2 * max(64, case.page_size) * case.head_dim
    stage = page * (jnp.dtype(case.pages_dtype or case.dtype).itemsize)
    fitting = []
    for programs, stages in _CHOICES:
        spec = gpu.Spec(
            rows=case.rows,
            group=case.group,
            head_dim=case.head_dim,
            page_size=case.page_size,
            pages_dtype=jnp.dtype(case.pages_dtype or case.dtype),
            dtype=jnp.dtype(case.dtype),
            tile=gpu.tile_of(case.page_size),
            stages=stages,
            programs=programs,
            scale=1.0,
            return_lse=False,
            return_scores=False,
        )
        in_flight = programs * stages * stage
        if programs * spec.shared_bytes <= 227 * 1024 and in_flight >= 48 * 1024:
            fitting.append((programs, stages))
    return fitting


def compile_chain(case, pools, lengths, q, programs, stages):
    """Compile a chain of calls with these settings."""
    plan = make_plan(
        lengths, tile=gpu.tile_of(case.page_size), programs=programs * target_gpu().cores
    )

    @jax.jit
    def once(q, pool, lengths, plan):
        k_pages, v_pages, table, k_scales, v_scales = pool
        (out,) = gpu.mosaic(
            q,
            k_pages,
            v_pages,
            table,
            lengths,
            k_scales,
            v_scales,
            plan,
            scale=case.head_dim**-0.5,
            return_lse=False,
            return_scores=False,
            stages=stages,
        )
        return out

    def chain(q, pools, lengths, plan):
        for i in range(CALLS):
            q = once(q, pools[i % len(pools)], lengths, plan)
        return q

    arguments = (q, pools, lengths, plan)
    compiled = jax.jit(chain).lower(*arguments).compile()
    return lambda: compiled(*arguments)


def tune(case) -> dict:
    """Time all settings of one shape; the entry of the best, with all periods beside it."""
    pools = draw_pools(case)
    lengths = jnp.asarray(case.lengths, jnp.int32)
    q = jax.random.normal(jax.random.key(1), (case.rows, case.group, case.head_dim), case.dtype)
    choices = choices_for(case)
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        chains = list(threads.map(lambda c: compile_chain(case, pools, lengths, q, *c), choices))
    periods = {}
    for choice, chain in zip(choices, chains, strict=True):
        periods[choice] = time_chain(chain).period
    programs, stages = min(periods, key=periods.get)
    for choice, period in sorted(periods.items(), key=lambda item: item[1])[:5]:
        print(f"{case.name:40s} programs, stages {choice}: {period:8.2f} us", flush=True)
    return {
        "when": {
            "head_dim": case.head_dim,
            "page_size": case.page_size,
            "bytes": jnp.dtype(case.pages_dtype or case.dtype).itemsize,
            "small": case.name.endswith("small"),
        },
        "use": {"programs_per_core": programs, "stages": stages},
        "period_us": {f"{p}x{s}": round(t, 2) for (p, s), t in periods.items()},
    }


def main() -> None:
    """Tune every shape and write the device's file, keeping other kernels' entries."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="pallas_kernels/tuned")
    parser.add_argument("--cases", nargs="*", default=[case.name for case in cases.TUNING])
    arguments = parser.parse_args()
    path = pathlib.Path(arguments.out) / tuned.file_name(jax.devices()[0].device_kind)
    path.parent.mkdir(parents=True, exist_ok=True)
    report = json.loads(path.read_text()) if path.exists() else {"kernels": {}}
    report |= environment()
    entries = {json.dumps(e["when"]): e for e in report["kernels"].get(KERNEL, [])}
    for name in arguments.cases:
        entry = tune(cases.by_name(name))
        entry["command"] = "python experiments/tune_decode_kernel.py " + " ".join(sys.argv[1:])
        entries[json.dumps(entry["when"])] = entry
        report["kernels"][KERNEL] = list(entries.values())
        path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
