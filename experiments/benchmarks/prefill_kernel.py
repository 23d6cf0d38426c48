"""Time prompt attention of one chunk over a compressed past, against cuDNN over the dense past.

A chunk of 2048 queries (Llama-3.1-8B's heads) follows a past of 30720 tokens, of which each head
keeps a share: all, a quarter or an eighth on average, unevenly. Times are sums of kernel times by
the profiler, medians over rounds in which the contenders take turns; the plan of the key tiles is
counted in. The output is checked against the float32 XLA reference in the same run.

    python -m experiments.benchmarks.prefill_kernel --out experiments/results/kernels
"""

import dataclasses
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
from dms_jax.command_line.reports import make_folder
from dms_jax.command_line.running import run
from dms_jax.json_text import json_text
from experiments.benchmarks.kernel_timing import command_line, environment, require_gpu
from experiments.benchmarks.settings import check_numbers
from pallas_kernels import prefill_attention

CHUNK, PAST, HEADS, KV_HEADS, DIM, PAGE, WINDOW = 2048, 30720, 32, 8, 128, 64, 512
IMPLEMENTATIONS = ("mosaic_gpu", "mosaic_mma", "xla")


def draw(rng: np.random.Generator, ratio: int, past: int, chunk: int) -> dict:
    """One sequence whose heads keep past / ratio slots on average; pages in random order."""
    shares = rng.uniform(0.5, 1.5, KV_HEADS) if ratio > 1 else np.ones(KV_HEADS)
    lengths = np.minimum(past, shares / shares.mean() * past / ratio).astype(np.int32)
    columns = -(-past // PAGE)
    used = -(-lengths // PAGE)
    order = rng.permutation(used.sum())
    table = np.full((1, KV_HEADS, columns), np.iinfo(np.int32).max, np.int32)
    for head, count in enumerate(used):
        table[0, head, :count] = order[used[:head].sum() :][:count]
    # The marked keys of the last window go as the chunk proceeds.
    until = np.full((1, KV_HEADS, columns * PAGE), 2**30, np.int32)
    if ratio > 1:
        for head, length in enumerate(lengths):
            recent = slice(max(length - WINDOW, 0), length)
            marked = rng.random(length - recent.start) < 1 - 1 / ratio
            until[0, head, recent][marked] = np.arange(len(marked))[marked]

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16)

    return {
        "q": normal(1, chunk, HEADS, DIM),
        "k": normal(1, chunk, KV_HEADS, DIM),
        "v": normal(1, chunk, KV_HEADS, DIM),
        "evicted": jnp.asarray(rng.random((1, KV_HEADS, chunk)) < 1 - 1 / ratio),
        "counts": jnp.asarray([chunk], jnp.int32),
        "k_pages": normal(int(used.sum()), PAGE, DIM),
        "v_pages": normal(int(used.sum()), PAGE, DIM),
        "page_table": jnp.asarray(table),
        "past_lengths": jnp.asarray(lengths[None]),
        "past_until": jnp.asarray(until),
    }


def attention(implementation: str):
    def attend(arrays):
        return prefill_attention(
            **arrays, window=WINDOW, scale=DIM**-0.5, implementation=implementation
        )

    return jax.jit(attend)


def check(rng: np.random.Generator, ratio: int, implementation: str) -> float:
    arrays = draw(rng, ratio, past=1500, chunk=600)
    exact = {n: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for n, x in arrays.items()}
    wanted = attention("xla")(jax.device_put(exact, jax.devices("cpu")[0]))
    got = attention(implementation)(arrays)
    got, wanted = (np.asarray(x, np.float64) for x in (got, wanted))
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


@dataclasses.dataclass(frozen=True)
class Config:
    """Time prompt attention."""

    out: pathlib.Path = pathlib.Path("runs/training_kernels")
    """Folder for the figures, prefill_kernel.json."""
    rounds: int = 9
    """Timed rounds; the median counts."""
    implementation: str = "mosaic_gpu"
    """What serves the prompts: mosaic_gpu, mosaic_mma or xla."""

    def __post_init__(self):
        check_numbers(self)


def main(config: Config) -> None:
    """Checks, measures, prints, and writes the report."""
    check_names("--implementation", (config.implementation,), IMPLEMENTATIONS)
    require_gpu()
    make_folder("--out", config.out)
    seed = int.from_bytes(os.urandom(4), "little")
    rng = np.random.default_rng(seed)

    def cudnn(arrays):
        q, k, v = arrays
        return jax.nn.dot_product_attention(q, k, v, scale=DIM**-0.5, implementation="cudnn")

    contenders, errors, live = {}, {}, {}
    for ratio in (1, 4, 8):
        errors[f"ratio_{ratio}"] = check(rng, ratio, config.implementation)
        arrays = draw(rng, ratio, PAST, CHUNK)
        live[f"ratio_{ratio}"] = int(np.asarray(arrays["past_lengths"]).mean())
        function = attention(config.implementation).lower(arrays).compile()
        contenders[f"ratio_{ratio}"] = (function, arrays)
    dense = tuple(
        jnp.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16)
        for shape in ((1, CHUNK, HEADS, DIM), *[(1, PAST + CHUNK, KV_HEADS, DIM)] * 2)
    )
    # cuDNN sees every key of the chunk too: its causal mask would start at the first key.
    contenders["cudnn_dense"] = (jax.jit(cudnn).lower(dense).compile(), dense)
    times = {name: [] for name in contenders}
    kernels = {name: {} for name in contenders}
    for _ in range(config.rounds):
        for name, (function, arrays) in contenders.items():
            timer = profiler.Cupti(finalize=False).measure(function, aggregate=False)
            launches: Any = timer(arrays)[1]
            assert launches, "the profiler saw no kernel"
            times[name].append(sum(duration for _, duration in launches))
            for kernel, duration in launches:
                kernels[name].setdefault(kernel[:80], []).append(duration)
    report = environment() | {
        "command": command_line(),
        "implementation": config.implementation,
        "seed": seed,
        "shape": f"chunk {CHUNK}, past {PAST}, heads {HEADS}/{KV_HEADS} of {DIM}, page {PAGE}, "
        f"window {WINDOW}, bfloat16",
        "mean_past_slots": live,
        "relative_errors": errors,
        "milliseconds": {name: statistics.median(x) for name, x in times.items()},
        "kernels": {
            name: {kernel: statistics.median(x) for kernel, x in entries.items()}
            for name, entries in kernels.items()
        },
    }
    (config.out / "prefill_kernel.json").write_text(json_text(report, indent=1))
    print(json_text({k: v for k, v in report.items() if k != "kernels"}, indent=1))


if __name__ == "__main__":
    sys.exit(run(main, Config, description=__doc__))
