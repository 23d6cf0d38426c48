"""Inputs and the NumPy oracle of received attention, one query and head at a time."""

import jax
import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy
import numpy as np

from pallas_kernels.received import NEVER

ORDER = ("q", "k", "positions", "since")


def draw(case, seed=0, dtype=None):
    """Draws the arguments of `received_attention` in order, as NumPy arrays.

    Padded queries and unused slots hold NaN.
    """
    rng = np.random.default_rng([seed, *case.name.encode()])
    dtype = dtype or case.dtype
    q = rng.standard_normal((case.B, case.T, case.H, case.D))
    k = rng.standard_normal((case.B, case.K, case.slots, case.D))
    positions = np.full((case.B, case.T), -1, np.int32)
    since = np.full((case.B, case.K, case.slots), NEVER, np.int32)
    for b, (count, start) in enumerate(zip(case.counts, case.starts, strict=True)):
        positions[b, :count] = start + np.arange(count)
        q[b, count:] = np.nan
        for h, length in enumerate(case.lengths[b]):
            k[b, h, length:] = np.nan
            held = np.arange(length)
            if case.shuffled:
                held = rng.permutation(start + count)[:length]
            since[b, h, :length] = held
    return [q.astype(dtype), k.astype(dtype), positions, since]


def structs(case, sharding=None):
    """Shapes and dtypes of `draw`'s arrays, by name."""
    shapes = {
        "q": ((case.B, case.T, case.H, case.D), case.dtype),
        "k": ((case.B, case.K, case.slots, case.D), case.dtype),
        "positions": ((case.B, case.T), np.int32),
        "since": ((case.B, case.K, case.slots), np.int32),
    }
    return {
        name: jax.ShapeDtypeStruct(shape, np.dtype(dtype), sharding=sharding)
        for name, (shape, dtype) in shapes.items()
    }


def oracle(arguments, scale):
    """Sums in float64."""
    q, k, positions, since = arguments
    q, k = q.astype(np.float64), k.astype(np.float64)
    sums = np.zeros(since.shape)
    group = q.shape[2] // k.shape[1]
    for b, i in zip(*np.nonzero(positions >= 0), strict=True):
        for h in range(q.shape[2]):
            seen = np.flatnonzero(since[b, h // group] <= positions[b, i])
            if seen.size:
                scores = scale * k[b, h // group, seen] @ q[b, i, h]
                weights = np.exp(scores - scores.max())
                sums[b, h // group, seen] += weights / weights.sum() / group
    return sums
