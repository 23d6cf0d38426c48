"""The weights that slots receive from the queries of a chunk, against NumPy."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dms_jax.policies import received
from dms_jax.policies.received import NEVER, received_attention


def draw(dtype="float32", *, tokens=70, shuffled=False):
    """Returns q, k, positions and since of two sequences; padding and unused slots hold NaN."""
    rng = np.random.default_rng(0)
    counts, starts, lengths = (tokens, 30), (200, 0), ((100, 64), (30, 30))
    q, k = rng.standard_normal((2, tokens, 6, 8)), rng.standard_normal((2, 2, 120, 8))
    positions = np.full((2, tokens), -1, np.int32)
    since = np.full((2, 2, 120), NEVER, np.int32)
    for b, (count, start) in enumerate(zip(counts, starts, strict=True)):
        positions[b, :count] = start + np.arange(count)
        q[b, count:] = np.nan
        for h, length in enumerate(lengths[b]):
            k[b, h, length:] = np.nan
            ids = rng.permutation(start + count) if shuffled else np.arange(start + count)
            since[b, h, :length] = ids[:length]
    return q.astype(dtype), k.astype(dtype), positions, since


def oracle(q, k, positions, since, scale):
    q, k = q.astype(np.float64), k.astype(np.float64)
    sums, group = np.zeros(since.shape), q.shape[2] // k.shape[1]
    for b, i in zip(*np.nonzero(positions >= 0), strict=True):
        for h in range(q.shape[2]):
            seen = np.flatnonzero(since[b, h // group] <= positions[b, i])
            if seen.size:
                scores = scale * k[b, h // group, seen] @ q[b, i, h]
                weights = np.exp(scores - scores.max())
                sums[b, h // group, seen] += weights / weights.sum() / group
    return sums


@pytest.mark.parametrize("most", [received.MOST_WEIGHTS, 1])
@pytest.mark.parametrize("shuffled", [False, True])
def test_agrees_with_the_oracle(most, shuffled, monkeypatch):
    """With one block of queries, and with the most blocks."""
    monkeypatch.setattr(received, "MOST_WEIGHTS", most)
    given = draw(shuffled=shuffled)
    sums = jax.jit(functools.partial(received_attention, scale=0.3))(*given)
    chex.assert_type(sums, "float32")
    chex.assert_trees_all_close(sums, oracle(*given, 0.3).astype(np.float32), rtol=1e-5, atol=1e-5)


def test_chunks_add_up_to_the_prompt():
    """Each chunk gets all slots of the prompt, and sees the written ones."""
    q, k, positions, since = draw()
    parts = [
        oracle(q[:, part], k, positions[:, part], since, 0.1)
        for part in (slice(0, 50), slice(50, None))
    ]
    found = received_attention(*map(jnp.asarray, (q, k, positions, since)), scale=0.1)
    chex.assert_trees_all_close(found, sum(parts).astype(np.float32), rtol=1e-5, atol=1e-5)


def test_float64_stays_float64():
    given = draw("float64", shuffled=True)
    with jax.enable_x64(True):
        sums = received_attention(*map(jnp.asarray, given), scale=0.3)
        chex.assert_type(sums, "float64")
    chex.assert_trees_all_close(np.asarray(sums), oracle(*given, 0.3), rtol=1e-12, atol=1e-12)
