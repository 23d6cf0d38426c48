"""Inputs and the NumPy oracle of prefill attention, one query and one head at a time."""

import jax
import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy
import numpy as np

from pallas_kernels.prefill.chunk import Chunk, Past

ORDER = (
    "q",
    "k",
    "v",
    "evicted",
    "counts",
    "k_pages",
    "v_pages",
    "page_table",
    "past_lengths",
    "past_until",
)


def draw(case, seed=0, dtype=None):
    """Draws the arguments of `prefill_attention` in order, as NumPy arrays.

    Unused slots and pages, and padded keys, hold NaN; table entries past a row's length are out of
    range.
    """
    rng = np.random.default_rng([seed, *case.name.encode()])
    dtype = dtype or case.dtype
    past = np.array(case.past, np.int32)
    used = -(-past // case.P)
    pool = int(used.sum()) + 1
    free = list(rng.permutation(pool))
    table = np.full((case.B, case.K, case.M), 10**9, np.int32)
    table[..., 1::2] = -3
    live = np.zeros((pool, case.P), bool)
    for b in range(case.B):
        for h in range(case.K):
            for m in range(used[b, h]):
                table[b, h, m] = free.pop()
                live[table[b, h, m], : past[b, h] - m * case.P] = True

    def normal(*shape):
        return rng.standard_normal(shape)

    slots = (case.B, case.K, case.M * case.P)
    until = rng.integers(-5, case.T + 50, slots)
    arrays = {
        "q": normal(case.B, case.T, case.H, case.D),
        "k": normal(case.B, case.T, case.K, case.D),
        "v": normal(case.B, case.T, case.K, case.D),
        "k_pages": normal(pool, case.P, case.D),
        "v_pages": normal(pool, case.P, case.D),
        "evicted": rng.random((case.B, case.K, case.T)) < case.evicted,
        "counts": np.array(case.counts, np.int32),
        "page_table": table,
        "past_lengths": past,
        "past_until": np.where(rng.random(slots) < 0.7, 2**30, until).astype(np.int32),
    }
    for name in ("k", "v"):
        arrays[f"{name}_pages"][~live] = np.nan
        for b, count in enumerate(case.counts):
            arrays[name][b, count:] = np.nan
    for name in ("q", "k", "v", "k_pages", "v_pages"):
        arrays[name] = arrays[name].astype(dtype)
    return [arrays[name] for name in ORDER]


def structs(case, sharding=None):
    """Shapes and dtypes of `draw`'s arrays."""
    own, keys = (case.B, case.T, case.H, case.D), (case.B, case.T, case.K, case.D)
    pages = (int((-(-np.array(case.past) // case.P)).sum()) + 1, case.P, case.D)
    rows = (case.B, case.K)
    shapes = {
        "q": (own, case.dtype),
        **dict.fromkeys(("k", "v"), (keys, case.dtype)),
        **dict.fromkeys(("k_pages", "v_pages"), (pages, case.dtype)),
        "evicted": ((*rows, case.T), bool),
        "counts": ((case.B,), np.int32),
        "page_table": ((*rows, case.M), np.int32),
        "past_lengths": (rows, np.int32),
        "past_until": ((*rows, case.M * case.P), np.int32),
    }
    return [
        jax.ShapeDtypeStruct(shape, np.dtype(dtype), sharding=sharding)
        for shape, dtype in (shapes[name] for name in ORDER)
    ]


def split_keys(arguments):
    """The queries of a call, the keys of its chunk, and those of its past."""
    return arguments[0], Chunk(*arguments[1:5]), Past(*arguments[5:])


def oracle(arguments, window, scale, *, sinks=None, soft_cap=None):
    """Output in float64."""
    q, k, v, evicted, counts, k_pages, v_pages, table, past, until = arguments
    q, k, v, k_pages, v_pages = (x.astype(np.float64) for x in (q, k, v, k_pages, v_pages))
    out = np.zeros(q.shape)
    group, page = q.shape[2] // k.shape[2], k_pages.shape[1]
    for b, count in enumerate(counts):
        for h in range(q.shape[2]):
            n = h // group
            slots = np.arange(past[b, n])
            places = (table[b, n, slots // page], slots % page)
            for i in range(count):
                j = np.arange(i + 1)
                j = j[(i - j <= window) | ~evicted[b, n, : i + 1]]
                seen = i <= until[b, n, : len(slots)]
                keys = np.concatenate([k[b, j, n], k_pages[places][seen]])
                values = np.concatenate([v[b, j, n], v_pages[places][seen]])
                scores = scale * keys @ q[b, i, h]
                if soft_cap is not None:
                    scores = soft_cap * np.tanh(scores / soft_cap)
                if sinks is not None:  # one more key, whose value is 0
                    scores = np.append(scores, sinks[h])
                    values = np.concatenate([values, np.zeros((1, values.shape[1]))])
                weights = np.exp(scores - scores.max())
                out[b, i, h] = weights @ values / weights.sum()
    return out
