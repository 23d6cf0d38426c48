"""Cuts after a decode step: only due rows are scored and moved."""

import dataclasses
import functools
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dms_jax.cache import Pool
from dms_jax.model import cutting
from dms_jax.model.cutting import cut_layers
from dms_jax.policies import Knorm
from dms_jax.policies.values import PolicyState
from tests.support.chunks import chunk_of, tokens_of

LAYERS, BATCH, HEADS, PAGES, PAGE_SIZE, DIM = 4, 8, 2, 3, 4, 2
BUDGET, INTERVAL = 5, 4
SCORED: list[int] = []  # sequences of a layer, in each call


@dataclasses.dataclass(frozen=True)
class Counted(Knorm):
    """Records the scored rows."""

    def scores(self, state, chunk, rows):
        jax.debug.callback(lambda _: SCORED.append(rows.k.shape[0]), rows.lengths)
        return super().scores(state, chunk, rows)


@functools.cache
def cut_in_passes(pairs: int):
    """Returns a cut with a limit on (layer, sequence) pairs at a time."""

    @jax.jit
    def cut(*arrays):
        with mock.patch.object(cutting, "MOST_NUMBERS", pairs * HEADS * PAGES * PAGE_SIZE * DIM):
            policy = Counted(budget=BUDGET, interval=INTERVAL)
            return cut_layers(policy, *arrays, centers=None, dtype=jnp.float32)

    return cut


@pytest.mark.parametrize("pairs", [0, 3, BATCH, 100])
@pytest.mark.parametrize("due", [[], [6], [1, 2, 7], list(range(BATCH))])
def test_a_cut_scores_only_due_rows(due, pairs):
    """Checks lengths, the remaining slots, and that pages of other sequences do not change.

    A pass has at least one pair, even if that exceeds the memory limit.
    """
    rows = (LAYERS, BATCH, HEADS)
    rng = np.random.default_rng(0)
    table = rng.permutation(np.prod(rows) * PAGES).reshape(*rows, PAGES).astype(np.int32)
    k, v = rng.normal(size=(2, table.size, PAGE_SIZE, DIM)).astype(np.float32)
    lengths = np.full(rows, BUDGET + INTERVAL - 1, np.int32)
    lengths[:, due] += 1
    chunk = chunk_of(
        tokens_of(np.zeros((BATCH, 1, HEADS, DIM))), max_lengths=[40] * BATCH, page_size=PAGE_SIZE
    )
    SCORED.clear()
    pool, _, after, reads = cut_in_passes(pairs)(
        Pool(k_pages=jnp.asarray(k), v_pages=jnp.asarray(v)), PolicyState(), chunk, table, lengths
    )
    jax.effects_barrier()
    size = min(max(pairs, 1), BATCH)
    assert sum(SCORED) == -(-LAYERS * len(due) // size) * size  # whole passes
    want = lengths.copy()
    want[:, due] = BUDGET
    chex.assert_trees_all_equal(np.asarray(after), want)
    again = np.isin(np.arange(BATCH), due) * LAYERS * HEADS * (BUDGET + INTERVAL)
    chex.assert_trees_all_equal(np.asarray(reads), again)
    for row in np.ndindex(rows):
        slots = np.arange(lengths[row])
        if row[1] in due:  # those with the smallest norms stay, in their order
            norms = np.linalg.norm(k[table[row]].reshape(-1, DIM)[slots], axis=-1)
            slots = np.sort(np.argsort(norms)[:BUDGET])
        for before, pages in ((k, pool.k_pages), (v, pool.v_pages)):
            kept = np.asarray(pages)[table[row]].reshape(-1, DIM)[: len(slots)]
            chex.assert_trees_all_equal(kept, before[table[row]].reshape(-1, DIM)[slots])
