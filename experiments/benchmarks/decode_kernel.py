"""Time decode attention against cuDNN, jax's stock Pallas kernel and XLA on one GPU.

Every implementation is checked against float32 attention on fresh random data before it is timed.
Rates count the bytes of live keys and values, once. cuDNN reads the same number of tokens laid out
densely; where rows differ in length it reads the longest for all, so such cases have no cuDNN row.

The other kernels have scripts of their own: `write_kernel.py`, `select_kernel.py`,
`prefill_kernel.py`, `training_kernels.py`.

    python -m experiments.benchmarks.decode_kernel --out experiments/results/kernels
    python -m experiments.benchmarks.decode_kernel --picture experiments/results/kernels
"""

import dataclasses
import functools
import json
import pathlib
import statistics
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dms_jax.command_line.options import check_names
from dms_jax.command_line.reports import make_folder, read_file
from dms_jax.command_line.running import run
from dms_jax.json_text import json_text
from experiments.benchmarks.kernel_timing import (
    CALLS,
    ROTATED_BYTES,
    chain_of,
    command_line,
    draw_pools,
    draw_queries,
    environment,
    require_gpu,
    time_chain,
)
from experiments.benchmarks.settings import check_numbers
from pallas_kernels import decode_attention, decode_plan
from pallas_kernels.decode import cases

# Above this, XLA's gathered copies and the stock kernel's split are not worth their time.
_SLOW_BYTES = 1_100_000_000
_KV_HEADS = 8


def paged(case, q, pools, lengths, implementation, plan_inside):
    """Make a chain of `decode_attention`, with its plan made before or inside every call."""
    arguments = {
        "columns": case.columns,
        "page_size": case.page_size,
        "head_dim": case.head_dim,
        "dtype": case.pages_dtype or case.dtype,
        "implementation": implementation,
    }
    plan = jax.jit(functools.partial(decode_plan, **arguments))(lengths)
    # Lengths of their own, or one plan would be shared by the chain.
    inputs = [(pools[i % len(pools)], jnp.array(lengths)) for i in range(CALLS)]

    def call(q, pool_and_lengths, plan):
        (k_pages, v_pages, table, k_scales, v_scales), lengths = pool_and_lengths
        if plan_inside:
            # No plan is made before its turn.
            q, lengths = jax.lax.optimization_barrier((q, lengths))
            plan = None
        return decode_attention(
            q,
            k_pages,
            v_pages,
            table,
            lengths,
            scale=case.head_dim**-0.5,
            k_scales=k_scales,
            v_scales=v_scales,
            plan=plan,
            implementation=implementation,
        )

    return chain_of(call, q, inputs, plan)


def cudnn(case, q):
    """Make a chain of cuDNN's attention over a dense cache of the same size."""
    batch, length = case.rows // _KV_HEADS, case.lengths[0]
    keys = jax.random.split(jax.random.key(7), 2)
    sets = min(CALLS, -(-ROTATED_BYTES // case.live_bytes))
    shape = (batch, length, _KV_HEADS, case.head_dim)
    pairs = [tuple(jax.random.normal(key, shape, case.dtype) for key in keys) for _ in range(sets)]
    q = q.reshape(batch, 1, _KV_HEADS * case.group, case.head_dim)

    def call(q, pair):
        return jax.nn.dot_product_attention(q, *pair, implementation="cudnn")

    return chain_of(call, q, pairs)


def torch_microseconds(case, rounds=20) -> float:
    """Time PyTorch's SDPA over a dense cache of the same size, by device events, median."""
    import torch  # pyright: ignore[reportMissingImports]

    batch, length = case.rows // _KV_HEADS, case.lengths[0]
    sets = min(CALLS, -(-ROTATED_BYTES // case.live_bytes))

    def draw(*shape):
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    q = draw(batch, _KV_HEADS * case.group, 1, case.head_dim)
    shape = (batch, _KV_HEADS, length, case.head_dim)
    pairs = [(draw(*shape), draw(*shape)) for _ in range(sets)]
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds)]
    for start, stop in marks:
        start.record()
        for i in range(CALLS):
            k, v = pairs[i % sets]
            torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        stop.record()
    torch.cuda.synchronize()
    times = [start.elapsed_time(stop) * 1e3 / CALLS for start, stop in marks]
    return statistics.median(times[rounds // 4 :])


def stock(case, q, pools, lengths):
    """Make a chain of jax's own paged attention for GPUs, one KV head a row."""
    from jax.experimental.pallas.ops.gpu import paged_attention as module

    def call(q, pool, lengths):
        k_pages, v_pages, table, _, _ = pool
        scaled = (q * case.head_dim**-0.5).astype(q.dtype)
        return module.paged_attention(scaled, k_pages[None], v_pages[None], table, lengths)

    return chain_of(call, q, pools, lengths)


def error_of(case, q, pool, lengths, implementation) -> float:
    """Compare some rows with float32 attention: norm of the difference over the norm."""
    rows = np.random.default_rng(1).permutation(case.rows)[:4]
    k_pages, v_pages, table, k_scales, v_scales = pool

    @jax.jit
    def run(q, pool, lengths):
        k_pages, v_pages, table, k_scales, v_scales = pool
        return decode_attention(
            q,
            k_pages,
            v_pages,
            table,
            lengths,
            scale=case.head_dim**-0.5,
            k_scales=k_scales,
            v_scales=v_scales,
            implementation=implementation,
        )

    got = np.asarray(run(q, pool, lengths)[rows], np.float64)
    part = table[rows]

    def gather(pages, scales):
        values = pages[part].astype(jnp.float32)
        if scales is not None:
            values = values * scales[part][..., None]
        return values.reshape(-1, case.page_size, case.head_dim)

    with jax.default_matmul_precision("highest"):
        want = decode_attention(
            q[rows].astype(jnp.float32),
            gather(k_pages, k_scales),
            gather(v_pages, v_scales),
            jnp.arange(part.size, dtype=jnp.int32).reshape(part.shape),
            lengths[rows],
            scale=case.head_dim**-0.5,
            implementation="xla",
        )
    want = np.asarray(want, np.float64)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def measure(case, seed, only) -> list[dict]:
    """Time every contender on one case."""
    pools = draw_pools(case, seed)
    lengths = jnp.asarray(case.lengths, jnp.int32)
    q = draw_queries(case, seed)
    contenders = {
        "mosaic_gpu": lambda: paged(case, q, pools, lengths, "mosaic_gpu", False),
        "mosaic_gpu, plan included": lambda: paged(case, q, pools, lengths, "mosaic_gpu", True),
        "mosaic_mma": lambda: paged(case, q, pools, lengths, "mosaic_mma", False),
    }
    even = len(set(case.lengths)) == 1
    if even and case.dtype == "bfloat16" and case.pages_dtype is None:
        contenders["cudnn, dense"] = lambda: cudnn(case, q)
    if case.live_bytes < _SLOW_BYTES:
        contenders["xla"] = lambda: paged(case, q, pools, lengths, "xla", False)
        if case.dtype == "bfloat16" and case.pages_dtype is None:
            contenders["stock pallas"] = lambda: stock(case, q, pools, lengths)
    records = []
    for name, make in contenders.items():
        if only and name.split(",")[0] not in only:
            continue
        record = {"case": case.name, "implementation": name, "live_bytes": case.live_bytes}
        try:
            if name.split(",")[0] in ("mosaic_gpu", "mosaic_mma", "xla"):
                implementation = name.split(",")[0]
                record["error"] = error_of(case, q, pools[0], lengths, implementation)
            timing = time_chain(make())
        except Exception as problem:  # A contender that cannot serve is part of the result.
            record["failed"] = f"{type(problem).__name__}: {problem}".splitlines()[0][:200]
            print(f"{case.name:28s} {name:28s} {record['failed']}", flush=True)
            records.append(record)
            continue
        record |= {
            "period_us": round(timing.period, 2),
            "main_kernel_us": round(timing.main, 2),
            "terabytes_per_second": round(case.live_bytes / timing.period / 1e6, 3),
            "kernels_us": {name: round(t, 2) for name, t in sorted(timing.kernels.items())},
        }
        records.append(record)
        print(
            f"{case.name:28s} {name:28s} period {timing.period:8.1f} us  main {timing.main:8.1f} us"
            f"  {record['terabytes_per_second']:6.2f} TB/s  error {record.get('error', 0):.4f}",
            flush=True,
        )
    if "cudnn, dense" in contenders and (not only or "torch" in only):
        try:
            period = torch_microseconds(case)
        except Exception as problem:  # No PyTorch, or one that cannot: left out, with the reason.
            print(f"{case.name:28s} torch sdpa, dense            {problem}"[:200], flush=True)
        else:
            rate = case.live_bytes / period / 1e6
            records.append(
                {
                    "case": case.name,
                    "implementation": "torch sdpa, dense",
                    "live_bytes": case.live_bytes,
                    "period_us": round(period, 2),
                    "terabytes_per_second": round(rate, 3),
                }
            )
            print(
                f"{case.name:28s} torch sdpa, dense  {period:8.1f} us {rate:.2f} TB/s", flush=True
            )
    return records


# Cases and contenders of the picture, in the words of readers; decode.json has all of them.
PICTURED = {
    "rows128_32768": "128 rows of 32,768",
    "rows512_4096": "512 rows of 4,096",
    "rows512_skewed_4096": "512 rows, uneven,\n4,096 at most",
    "rows64_1024": "64 rows of 1,024",
    "rows512_4096_head_dim64": "512 rows of 4,096,\nhead dim 64",
    "rows512_4096_float8": "512 rows of 4,096,\n8 bits",
}
CONTENDERS = {
    "mosaic_gpu": ("this kernel (Mosaic GPU)", "#c0392b"),
    "mosaic_mma": ("the kernel for other GPUs", "#e59866"),
    "cudnn, dense": ("cuDNN, no pages", "#2471a3"),
    "stock pallas": ("jax's own Pallas kernel", "#7d8c2f"),
    "xla": ("XLA", "#909497"),
}


def draw_picture(report: dict[str, Any], path: pathlib.Path) -> None:
    """Draw the rates of a report as bars, with the pure-read rate as a line."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    records = [r for r in report["records"] if "period_us" in r and r["case"] in PICTURED]
    names = [name for name in PICTURED if any(r["case"] == name for r in records)]
    bars = [
        [
            (name, r)
            for name in CONTENDERS
            for r in records
            if (r["case"], r["implementation"]) == (case, name)
        ]
        for case in names
    ]
    figure, axes = plt.subplots(figsize=(10, 0.25 * sum(map(len, bars)) + 2), layout="constrained")
    place, middles = 0.0, []
    for found in bars:  # those of a case below each other, and a gap before the next case
        middles.append(place + (len(found) - 1) / 2)
        for name, record in found:
            label, colour = CONTENDERS[name]
            rate = record["terabytes_per_second"]
            axes.barh(place, rate, 0.85, color=colour)
            inside = rate > 2
            axes.text(
                rate + (-0.05 if inside else 0.05),
                place,
                f"{label} {rate:.2f}",
                va="center",
                ha="right" if inside else "left",
                color="white" if inside else "black",
                fontsize=8,
            )
            place += 1
        place += 0.8
    axes.axvline(report["read_terabytes_per_second"], color="black", lw=1, ls="--")
    axes.text(report["read_terabytes_per_second"], -0.8, "a plain read ", ha="right", fontsize=8)
    axes.set_yticks(middles, [PICTURED[name] for name in names])
    axes.set_ylim(-1.5, place - 0.8)
    axes.set_xlim(right=1.05 * report["read_terabytes_per_second"])
    axes.invert_yaxis()
    axes.set_xlabel("live keys and values read, TB/s (start to start, gaps included)")
    axes.set_title(f"Decode attention on {report['device']}, jax {report['jax']}", fontsize=10)
    figure.savefig(path, dpi=120)


def read_rate() -> float:
    """Measure the rate of a pure read, a sum over 4 GB, in TB/s."""
    values = jax.random.normal(jax.random.key(0), (1 << 21, 1024), jnp.bfloat16)

    def call(total, values):
        return total + jnp.sum(values + total.astype(jnp.bfloat16), dtype=jnp.float32) * 1e-9

    timing = time_chain(chain_of(call, jnp.float32(0), [values]))
    return values.nbytes / timing.period / 1e6


@dataclasses.dataclass(frozen=True)
class Config:
    """Time decode attention."""

    out: pathlib.Path = pathlib.Path("runs/kernels")
    """Folder for decode.json and decode.png."""
    cases: tuple[str, ...] = tuple(case.name for case in cases.BENCHMARK)
    """Cases to time, by name; all of the benchmark's unless given."""
    only: tuple[str, ...] = ()
    """Implementations to time; all unless given."""
    extend: bool = False
    """Keep the other records of a report that is there."""
    seed: int = 0
    """Seed of the random queries, keys and values."""
    picture: pathlib.Path | None = None
    """A folder with decode.json: time nothing, draw it into --out."""

    def __post_init__(self):
        check_numbers(self, may_be_zero=("seed",))


def main(config: Config) -> None:
    """Measure, print, and write the report."""
    check_names("--cases", config.cases, (case.name for case in cases.BENCHMARK))
    if config.picture is None:
        require_gpu()
    make_folder("--out", config.out)
    if config.picture is not None:
        source = read_file("--picture", config.picture / "decode.json")
        draw_picture(json.loads(source), config.out / "decode.png")
        return
    report: dict[str, Any] = environment() | {
        "commands": [command_line()],
        "read_terabytes_per_second": round(read_rate(), 3),
        "records": [],
    }
    path = config.out / "decode.json"
    if config.extend and path.exists():
        before = json.loads(path.read_text())
        report["records"] = before["records"]
        report["commands"] = before["commands"] + report["commands"]
        report = before | report
    print(f"pure read {report['read_terabytes_per_second']} TB/s", flush=True)
    order = {case.name: i for i, case in enumerate(cases.BENCHMARK)}
    for name in config.cases:
        records = measure(cases.by_name(name), config.seed, list(config.only) or None)
        measured = {(record["case"], record["implementation"]) for record in records}
        report["records"] = records + [
            record
            for record in report["records"]
            if (record["case"], record["implementation"]) not in measured
        ]
        report["records"].sort(key=lambda record: order[record["case"]])
        path.write_text(json_text(report, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(run(main, Config, description=__doc__))
