"""Attention to the values with the largest weights, a fixed number or a share, against NumPy."""

import functools
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dms_jax.cache import Pool
from dms_jax.model import fetching
from dms_jax.model.fetching import attend_to_fetched
from dms_jax.policies.budget import LONGEST
from dms_jax.policies.values import Fetch, Reading
from tests.support.chunks import chunk_of, tokens_of

BATCH, HEADS, GROUP, PAGES, PAGE_SIZE, DIM = 3, 2, 2, 3, 4, 8
SLOTS = PAGES * PAGE_SIZE
LENGTHS = np.array([[12, 7], [1, 9], [0, 5]], np.int32)  # the last has a head that holds nothing
COUNTS = np.array([[3], [2], [6]], np.int32)


def rows_of(seed: int):
    """A pool with NaN after the rows' ends, a table, and queries."""
    random = np.random.default_rng(seed)
    table = random.permutation(BATCH * HEADS * PAGES).reshape(BATCH, HEADS, PAGES).astype(np.int32)
    k, v = random.normal(size=(2, table.size, PAGE_SIZE, DIM)).astype(np.float32)
    for row in np.ndindex(BATCH, HEADS):
        for slot in range(LENGTHS[row], SLOTS):
            v[table[*row, slot // PAGE_SIZE], slot % PAGE_SIZE] = np.nan
    return k, v, table, random.normal(size=(BATCH, HEADS * GROUP, DIM)).astype(np.float32)


def attended(k, v, table, q, count):
    """The output of every query head, [B, H, D], in float64."""
    out = np.zeros(q.shape)
    for batch, head in np.ndindex(*q.shape[:2]):
        row = batch, head // GROUP
        slots = np.arange(LENGTHS[row])
        if not slots.size:
            continue
        at = table[row][slots // PAGE_SIZE], slots % PAGE_SIZE
        logits = k[at].astype(np.float64) @ q[batch, head] * DIM**-0.5
        weights = np.exp(logits - logits.max())
        weights /= weights.sum()
        best = np.argsort(-logits, kind="stable")[: count[batch, 0]]
        out[batch, head] = weights[best] @ v[at][best]
    return out


@functools.cache
def attend(fixed: int | None, rows: int):
    """`attend_to_fetched`, with a limit on whole rows gathered at a time."""

    @jax.jit
    def run(k, v, table, q):
        chunk = chunk_of(
            tokens_of(np.zeros((BATCH, 1, HEADS, DIM))),
            max_lengths=[40] * BATCH,
            page_size=PAGE_SIZE,
            scale=DIM**-0.5,
        )
        counts = None if fixed else jnp.asarray(COUNTS)
        fetch = Fetch(fixed or LONGEST, counts)
        reading = Reading(table, jnp.asarray(LENGTHS), fetch=fetch)
        with mock.patch.object(fetching, "MOST_NUMBERS", rows * SLOTS * DIM):
            return attend_to_fetched(Pool(k_pages=k, v_pages=v), q, chunk, reading, None)

    return run


@pytest.mark.parametrize(
    ("fixed", "rows"), [(3, 1), (SLOTS + 5, 1), *[(None, n) for n in (0, 4, 9)]]
)
def test_the_largest_weights_are_summed(fixed, rows):
    count = COUNTS if fixed is None else np.full_like(COUNTS, fixed)
    for seed in range(5):
        given = rows_of(seed)
        out, reads = attend(fixed, rows)(*map(jnp.asarray, given))
        want = attended(*given, count)
        chex.assert_trees_all_close(
            np.asarray(out, np.float64).reshape(want.shape), want, rtol=1e-5, atol=1e-6
        )
        halves = np.where(count >= LENGTHS, 2 * LENGTHS, LENGTHS + GROUP * count)
        chex.assert_trees_all_equal(np.asarray(reads), (-(-halves // 2)).sum(-1).astype(np.int32))
