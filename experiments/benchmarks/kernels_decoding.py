"""Decode attention beside cuDNN, jax's stock kernel and XLA, checked on fresh random data."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks.timing import (
    CALLS,
    ROTATED_BYTES,
    chain_of,
    draw_pools,
    draw_queries,
    time_chain,
)
from pallas_kernels import decode_attention, decode_plan
from pallas_kernels.decode.cases import DecodeCase

# Above this, XLA's gathered copies and the stock kernel's split take too long to time.
_SLOW_BYTES = 1_100_000_000
_KV_HEADS = 8


def paged(case: DecodeCase, q, pools, lengths, implementation: str, plan_inside: bool):
    """Makes a chain of `decode_attention`, with its plan made before or inside every call."""
    arguments = {
        "columns": case.columns,
        "page_size": case.page_size,
        "head_dim": case.head_dim,
        "dtype": case.pages_dtype or case.dtype,
        "implementation": implementation,
    }
    plan = jax.jit(functools.partial(decode_plan, **arguments))(lengths)
    # Separate lengths; otherwise the chain would share one plan.
    inputs = [(pools[i % len(pools)], jnp.array(lengths)) for i in range(CALLS)]

    def call(q, pool_and_lengths, plan):
        pool, lengths = pool_and_lengths
        if plan_inside:
            # The plan may not be made before its turn.
            q, lengths = jax.lax.optimization_barrier((q, lengths))
            plan = None
        return attention(case, q, pool, lengths, plan=plan, implementation=implementation)

    return chain_of(call, q, inputs, plan)


def attention(case: DecodeCase, q, pool, lengths, **options):
    """`decode_attention` over a pool of `draw_pools`."""
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
        **options,
    )


def cudnn(case: DecodeCase, q):
    """Makes a chain of cuDNN's attention over a dense cache of the same size."""
    batch, length = case.rows // _KV_HEADS, case.lengths[0]
    keys = jax.random.split(jax.random.key(7), 2)
    sets = min(CALLS, -(-ROTATED_BYTES // case.live_bytes))
    shape = (batch, length, _KV_HEADS, case.head_dim)
    pairs = [tuple(jax.random.normal(key, shape, case.dtype) for key in keys) for _ in range(sets)]
    q = q.reshape(batch, 1, _KV_HEADS * case.group, case.head_dim)

    def call(q, pair):
        return jax.nn.dot_product_attention(q, *pair, implementation="cudnn")

    return chain_of(call, q, pairs)


def stock(case: DecodeCase, q, pools, lengths):
    """Makes a chain of jax's own paged attention for GPUs, one KV head a row."""
    from jax.experimental.pallas.ops.gpu import paged_attention as module

    def call(q, pool, lengths):
        k_pages, v_pages, table, _, _ = pool
        scaled = (q * case.head_dim**-0.5).astype(q.dtype)
        return module.paged_attention(scaled, k_pages[None], v_pages[None], table, lengths)

    return chain_of(call, q, pools, lengths)


def error_of(case: DecodeCase, q, pool, lengths, implementation: str) -> float:
    """Compares some rows with float32 attention: norm of the difference over the norm."""
    rows = np.random.default_rng(1).permutation(case.rows)[:4]
    run = jax.jit(functools.partial(attention, case, implementation=implementation))
    got = np.asarray(run(q, pool, lengths)[rows], np.float64)
    k_pages, v_pages, table, k_scales, v_scales = pool
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


def measure_decode(case: DecodeCase, name: str, seed: int) -> dict[str, Any] | None:
    """Checks and times one contender; None if it does not take part in this case."""
    implementation = name.split(",")[0]
    plain = case.dtype == "bfloat16" and case.pages_dtype is None
    if name in ("xla", "stock pallas") and case.live_bytes >= _SLOW_BYTES:
        return None
    if name == "stock pallas" and not plain:
        return None
    if name == "cudnn, dense" and not (plain and len(set(case.lengths)) == 1):
        return None
    q, lengths = draw_queries(case, seed), jnp.asarray(case.lengths, jnp.int32)
    record: dict[str, Any] = {"live_bytes": case.live_bytes}
    if name == "cudnn, dense":
        chain = cudnn(case, q)
    else:
        pools = draw_pools(case, seed)
        if name == "stock pallas":
            chain = stock(case, q, pools, lengths)
        else:
            record["error"] = error_of(case, q, pools[0], lengths, implementation)
            chain = paged(case, q, pools, lengths, implementation, name.endswith("plan included"))
    timing = time_chain(chain)
    return record | {
        "period_us": round(timing.period, 2),
        "main_kernel_us": round(timing.main, 2),
        "terabytes_per_second": round(case.live_bytes / timing.period / 1e6, 3),
        "kernels_us": {name: round(t, 2) for name, t in sorted(timing.kernels.items())},
    }
