"""Kernels of decode steps: attention, the write, the selection and the fetch of values.

Each is checked on fresh random data before it is timed.
"""

import functools
import statistics
import time
from typing import Any, NamedTuple

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
    time_program,
)
from pallas_kernels import (
    decode_attention,
    decode_plan,
    fetch_rows,
    rotate_and_write,
    select_largest,
    write_pages,
)
from pallas_kernels.decode.cases import DecodeCase
from pallas_kernels.select.cases import SelectCase
from pallas_kernels.update.cases import WriteCase
from pallas_kernels.update.reference import rotated

# Above this, XLA's gathered copies and the stock kernel's split take too long to time.
_SLOW_BYTES = 1_100_000_000
_KV_HEADS = 8


# -- attention -------------------------------------------------------------------------------------


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


def read_rate() -> float:
    """Measures the rate of a pure read, a sum over 4 GB, in TB/s."""
    values = jax.random.normal(jax.random.key(0), (1 << 21, 1024), jnp.bfloat16)

    def call(total, values):
        return total + jnp.sum(values + total.astype(jnp.bfloat16), dtype=jnp.float32) * 1e-9

    timing = time_chain(chain_of(call, jnp.float32(0), [values]))
    return values.nbytes / timing.period / 1e6


# -- the write -------------------------------------------------------------------------------------


def draw_pool(case: WriteCase, key: jax.Array) -> dict[str, jax.Array]:
    """Draws the arrays to write to."""
    pool = {}
    for name, one in zip(("k", "v"), jax.random.split(key), strict=True):
        shape = (case.pages, case.page_size, case.head_dim)
        pool[f"{name}_pages"] = jax.random.normal(one, shape, jnp.bfloat16).astype(case.dtype)
        if case.scaled:
            pool[f"{name}_scales"] = jax.random.uniform(one, shape[:2], minval=0.5, maxval=2)
    return pool


def draw_rows(case: WriteCase, key: jax.Array) -> dict[str, Any]:
    """Draws the inputs of one write."""
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
    """The pool after one write, and the rotated queries."""
    if "heads" in rows:
        after = rotate_and_write(**pool, **rows, implementation=implementation)
        return dict(zip(("q", "k_pages", "v_pages"), after, strict=True))
    after = write_pages(**pool, **rows, implementation=implementation)
    names = ("k_pages", "v_pages", "k_scales", "v_scales")
    return dict(zip(names, after, strict=False))


def writes_right(case: WriteCase, implementation: str, key: jax.Array) -> bool:
    """Whether the given slots hold the new entries, and all others are unchanged.

    Bit for bit, except for rotated entries, which may differ by one rounding.
    """
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
    """Whether numbers are equal up to one rounding in their dtype."""
    apart = jnp.abs(got.astype(jnp.float32) - want.astype(jnp.float32))
    unit = float(jnp.finfo(want.dtype).eps)
    return (apart <= unit * jnp.abs(want.astype(jnp.float32)) + 1e-6).all()


def measure_write(case: WriteCase, implementation: str, seed: int) -> dict[str, Any]:
    """Checks and times one implementation, over a pool larger than any cache."""
    key = jax.random.key(seed)
    right = writes_right(case, implementation, key)
    steps = [draw_rows(case, jax.random.fold_in(key, 2 + i)) for i in range(CALLS)]

    @functools.partial(jax.jit, donate_argnums=0)
    def chain(pool, steps):
        for rows in steps:
            # No part of a write may run before its turn.
            pool, rows = jax.lax.optimization_barrier((pool, rows))
            after = written(pool, rows, implementation)
            # XLA would not rotate unused queries.
            kept = jax.lax.optimization_barrier(after)
            pool = {name: kept[name] for name in pool}
        return pool

    state = [draw_pool(case, key)]

    def run():
        state[0] = jax.block_until_ready(chain(state[0], steps))

    times = time_program(run)
    return {"right": right, "write_us": times.pop("span_us"), **times}


# -- the selection ---------------------------------------------------------------------------------


def measure_select(case: SelectCase, implementation: str, seed: int) -> dict[str, Any]:
    """Checks one implementation against NumPy's stable sort, and times it."""
    draw = jax.jit(lambda key: jax.random.normal(key, (case.rows, case.width), case.dtype))
    keys = jax.random.split(jax.random.key(seed), CALLS)
    steps = [draw(key) for key in keys]
    select = functools.partial(select_largest, count=case.count, implementation=implementation)
    ranked = np.argsort(-np.asarray(steps[0]), axis=-1, kind="stable")
    right = bool((np.sort(ranked[:, : case.count], -1) == jax.jit(select)(steps[0])).all())

    @jax.jit
    def chain(steps):
        found = []
        for scores in steps:
            # No part of a selection may run before its turn.
            scores, found = jax.lax.optimization_barrier((scores, found))
            found.append(select(scores))
        return found

    def run():
        jax.block_until_ready(chain(steps))

    times = time_program(run)
    sizes = {"rows": case.rows, "width": case.width, "count": case.count}
    return sizes | {"right": right, "select_us": times.pop("span_us"), **times}


# -- the fetch of values ---------------------------------------------------------------------------


class FetchCase(NamedTuple):
    """The rows that one call fetches from a store of 2^21 rows of 128 bfloat16 numbers."""

    name: str
    rows: int


FETCHES = tuple(FetchCase(f"rows{rows}", rows) for rows in (1024, 4096, 32768))
_STORE, _DIM, _FETCHES = 1 << 21, 128, 16


def measure_fetch(case: FetchCase, implementation: str, seed: int) -> dict[str, Any]:
    """Checks and times fetches out of pinned host memory, in a loop on the device.

    The indices of each depend on the previous rows, so that fetches do not overlap.
    """
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    # Row i holds i mod 251, which bfloat16 represents exactly.
    column = (np.arange(_STORE) % 251).astype(jnp.bfloat16)
    store = jax.device_put(np.repeat(column[:, None], _DIM, axis=1), place)
    random = np.random.default_rng(seed)
    index = random.integers(0, _STORE, (_FETCHES, case.rows)).astype(np.int32)

    @jax.jit
    def run(store, index):
        def body(total, one):
            one = one + (total[0] * 0).astype(jnp.int32)
            rows = fetch_rows(store, one, implementation=implementation)
            return total + rows.astype(jnp.float32).sum(0), None

        return jax.lax.scan(body, jnp.zeros(_DIM, jnp.float32), index)[0]

    right = np.allclose(run(store, index), (index % 251).sum(dtype=np.float64), rtol=1e-3)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(run(store, index))
        times.append(time.perf_counter() - start)
    taken = statistics.median(times) / _FETCHES
    return {
        "rows": case.rows,
        "row_bytes": 2 * _DIM,
        "right": bool(right),
        "fetch_us": round(1e6 * taken, 1),
        "gigabytes_per_second": round(case.rows * 2 * _DIM / taken / 1e9, 2),
    }
