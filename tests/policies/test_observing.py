"""TOVA, H2O, StreamingLLM and Quest without a model: evicted tokens, weights, page bounds."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dms_jax.cache import Pool
from dms_jax.policies import (
    TOVA,
    Quest,
    RandomEviction,
    SnapKV,
    StreamingLLM,
    Vanilla,
)
from dms_jax.policies.quest import PageBounds
from dms_jax.policies.values import FOREVER, NOT_STORED, Chunk, Decisions, PolicyState, Rows
from tests.oracles import quest
from tests.support.chunks import chunk_of, state_of, tokens_of
from tests.support.instances import further


def rows_chunk(k, count, page_table, lengths, page_size, *, first=0, **fields):
    tokens = tokens_of(k, positions=first + np.arange(k.shape[1]))
    return chunk_of(
        tokens, count=count, page_table=page_table, lengths=lengths, page_size=page_size, **fields
    )


PAGE_SIZE, WIDTH, TOKENS = 3, 4, 14


@functools.partial(jax.jit, static_argnums=0)
def write_quest(policy: Quest, state: PolicyState, pool: Pool, chunk: Chunk):
    state, placement = policy.write(state, chunk)
    pool = pool.store(chunk.page_table, placement.slots, chunk.tokens.k, chunk.tokens.v)
    return policy.written(state, chunk, placement, pool), pool, placement


@pytest.mark.parametrize("width", [WIDTH, *further(1)])
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 2**20), evicts=st.booleans())
def test_quest_bounds_are_those_of_the_keys_on_each_page(width, seed, evicts):
    """Bounds cover the current keys of a page, not overwritten ones."""
    over = RandomEviction(window=1, rate=0.7) if evicts else Vanilla()
    policy = Quest(dense_layers=0, over=over)
    random = np.random.default_rng(seed)
    keys = random.normal(size=(2, TOKENS, 2, 4)).astype(np.float32)
    marks = random.random((2, 2, TOKENS)) < 0.7
    pages = -(-TOKENS // PAGE_SIZE)
    table = random.permutation(4 * pages).reshape(2, 2, pages)
    # The pages have stale bounds of earlier owners.
    stale = jnp.asarray(100 * random.normal(size=(4 * pages, 4)), jnp.float32)
    state = PolicyState(
        rows=state_of(policy, 2, 2, 4, page_size=PAGE_SIZE).rows,
        pages=PageBounds(low=stale, high=stale),
    )
    pool = Pool(*(jnp.full((4 * pages, PAGE_SIZE, 4), jnp.nan) for _ in range(2)))
    done, lengths = np.zeros(2, int), np.zeros((2, 2), np.int32)
    while (done < TOKENS).any():
        count = np.minimum(random.integers(0, width + 1, 2), TOKENS - done)
        part, marked = np.zeros((2, width, 2, 4), np.float32), np.zeros((2, 2, width), bool)
        for row in range(2):
            part[row, : count[row]] = keys[row, done[row] : done[row] + count[row]]
            marked[row, :, : count[row]] = marks[row, :, done[row] : done[row] + count[row]]
        decisions = Decisions(marks=jnp.asarray(marked))
        chunk = rows_chunk(
            part, count, table, lengths, PAGE_SIZE, first=done[:, None], decisions=decisions
        )
        state, pool, placement = write_quest(policy, state, pool, chunk)
        done, lengths = done + count, np.asarray(placement.lengths)
        low, high = np.asarray(state.pages.low), np.asarray(state.pages.high)
        query = random.normal(size=4).astype(np.float32)
        for row, head in np.ndindex(2, 2):
            used = table[row, head, : -(-lengths[row, head] // PAGE_SIZE)]
            bounds = np.maximum(query * low[used], query * high[used]).sum(-1)
            held = np.asarray(pool.k_pages)[used].reshape(-1, 4)[: lengths[row, head]]
            known = (held[:, None] == keys[row, : done[row], head]).all(-1).any(-1)
            assert known.all()
            want = quest.page_bounds(query, held, PAGE_SIZE) if len(held) else np.zeros(0)
            chex.assert_trees_all_close(bounds, want, rtol=1e-5, atol=1e-5)
    assert (lengths < TOKENS).any() == (evicts and marks[..., : TOKENS - 2].any())


def test_dense_prompt_reuses_the_victims_slot():
    """A prompt after answers starts in the slot of the last answer's victim."""
    policy = TOVA(budget=2, per="head", prefill="dense_then_evict")
    state = PolicyState(rows=jnp.asarray([[1, NOT_STORED]], jnp.int32))
    chunk = rows_chunk(np.zeros((1, 3, 2, 2)), [2], np.zeros((1, 2, 2)), [[3, 2]], 4, first=5)
    state, placement = policy.write(state, chunk)
    chex.assert_trees_all_equal(
        placement.slots, np.array([[[1, 3, NOT_STORED], [2, 3, NOT_STORED]]])
    )
    chex.assert_trees_all_equal(placement.lengths, np.array([[4, 4]]))
    chex.assert_trees_all_equal(placement.live, np.array([[[3, 4, 4], [3, 4, 4]]]))
    chex.assert_trees_all_equal(
        placement.past_until < 0, np.array([[[s == 1 for s in range(8)], [False] * 8]])
    )
    chex.assert_trees_all_equal(state.rows, np.array([[NOT_STORED] * 2]))


def test_ratio_window_appends_and_cuts_later_prompt():
    """A prompt may come after a row with reused slots."""
    policy = StreamingLLM(compression_ratio=2, sinks=1)  # a budget of four
    old = PolicyState(pages=jnp.asarray([[0, 5, 3, 4], [9, 9, 9, 9]], jnp.int32))
    rows = dict(page_table=[[[0, 1]]], lengths=[[4]], page_size=4, first=6, max_lengths=[8])
    step = rows_chunk(np.zeros((1, 1, 1, 2)), [1], **rows)
    _, placement = policy.write(old, step)
    assert placement.slots.tolist() == [[[2]]]  # of token 3
    prompt = rows_chunk(np.zeros((1, 3, 1, 2)), [2], **rows, one_pass=True)
    state, placement = policy.write(old, prompt)
    assert placement.slots.tolist() == [[[4, 5, NOT_STORED]]]
    assert placement.live.tolist() == [[[5, 6, 6]]]
    assert (placement.past_until == FOREVER).all()
    assert not placement.evicted.any()
    state = policy.written(state, prompt, placement, None)
    empty = jnp.zeros((1, 1, 8, 2))
    held = Rows(k=empty, v=empty, lengths=placement.lengths)
    keep = policy.survivors(state, prompt, held, None)
    assert keep.astype(int).tolist() == [[[1, 1, 0, 0, 1, 1, 0, 0]]]  # tokens 0, 5, 6, 7


@pytest.mark.parametrize(("tokens", "count"), [(1, 1), (3, 2)], ids=["step", "prompt"])
def test_snapkv_queries_see_slots_of_their_time(tokens, count):
    """The sums of their weights against NumPy, for rows cut before, of different lengths."""
    window, newest, lengths, slots = 4, 20, np.array([[9, 7]]), 12
    rng = np.random.default_rng(0)
    ring = rng.standard_normal((1, 2, window, 3, 8))
    keys = rng.standard_normal((1, 2, slots, 8))
    keys[np.arange(slots) >= lengths[..., None]] = 0
    chunk = rows_chunk(
        np.zeros((1, tokens, 2, 8)), [count], np.zeros((1, 2, 3)), lengths - count, 4,
        first=newest - count + 1,
    )  # fmt: skip
    expected = np.zeros((2, slots))
    for place in range(window):
        age = (newest - place) % window
        for head, length in enumerate(lengths[0]):
            seen = slice(0, length - age)
            scores = chunk.static.scale * ring[0, head, place] @ keys[0, head, seen].T
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            expected[head, seen] += (weights / weights.sum(-1, keepdims=True)).mean(0)
    rows = Rows(k=jnp.asarray(keys), v=jnp.asarray(keys), lengths=jnp.asarray(lengths))
    votes = SnapKV(budget=8, window=window)._votes(jnp.asarray(ring), chunk, rows)
    chex.assert_trees_all_close(votes[0], expected.astype(votes.dtype), atol=1e-6)
