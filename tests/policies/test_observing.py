"""TOVA and Quest without a model: who is dropped, and the bounds of pages."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dms_jax.policies import TOVA, Quest
from dms_jax.policies.base import NOT_STORED, Chunk, Decisions, PolicyState
from dms_jax.policies.quest import PageBounds
from tests.oracles import quest


def chunk_of(k, count, page_table, lengths, page_size, first=0):
    batch, num_tokens = k.shape[:2]
    positions = first + jnp.arange(num_tokens, dtype=jnp.int32)
    return Chunk(
        k=jnp.asarray(k),
        v=jnp.asarray(k),
        decisions=Decisions(),
        positions=jnp.broadcast_to(positions, (batch, num_tokens)),
        count=jnp.asarray(count, jnp.int32),
        page_table=jnp.asarray(page_table, jnp.int32),
        lengths=jnp.asarray(lengths, jnp.int32),
        page_size=page_size,
    )


def tova_write(policy, state, lengths, count):
    chunk = chunk_of(np.zeros((1, 1, 2, 2)), [count], np.zeros((1, 2, 2)), lengths, 4)
    state, placement = policy.write(state, chunk)
    return state, placement, chunk


def test_tova_gives_the_victims_slot_to_the_next_token():
    policy = TOVA(budget=2, per="head")
    state = PolicyState(rows=policy.init_rows(1, 2, 2, jnp.float32))
    lengths = np.zeros((1, 2), np.int32)
    slots = []
    # Weights [K, S] per step; slots beyond the length are zero and must not be chosen.
    for weights in ([[1, 0, 0], [1, 0, 0]], [[0.9, 0.1, 0], [0.4, 0.6, 0]]):
        state, placement, chunk = tova_write(policy, state, lengths, 1)
        slots.append(placement.slots[0, :, 0].tolist())
        observed = jnp.pad(
            jnp.asarray(weights, jnp.float32)[None, :, None], ((0, 0),) * 3 + ((0, 5),)
        )
        state = policy.observe(state, observed, chunk, placement, None)
        lengths = np.asarray(placement.lengths)
        assert state.rows.tolist() == [[NOT_STORED] * 2]
    # The third token is one too many: its attention shows who goes, here slot 1 and slot 2.
    state, placement, chunk = tova_write(policy, state, lengths, 1)
    observed = np.zeros((1, 2, 1, 8), np.float32)
    observed[0, 0, 0, :3], observed[0, 1, 0, :3] = [0.5, 0.1, 0.4], [0.5, 0.3, 0.2]
    state = policy.observe(state, jnp.asarray(observed), chunk, placement, None)
    assert state.rows.tolist() == [[1, 2]]
    # A sequence that takes no part in a step changes nothing.
    held, placement, chunk = tova_write(policy, state, np.asarray(placement.lengths), 0)
    assert (placement.slots == NOT_STORED).all()
    assert placement.lengths.tolist() == [[3, 3]]
    held = policy.observe(held, jnp.asarray(observed[..., ::-1]), chunk, placement, None)
    assert held.rows.tolist() == [[1, 2]]
    _, placement, _ = tova_write(policy, state, np.asarray(placement.lengths), 1)
    assert placement.slots[0, :, 0].tolist() == [1, 2]
    assert placement.lengths.tolist() == [[3, 3]]


def test_tova_averages_over_the_layer():
    policy = TOVA(budget=1)
    chunk = chunk_of(np.zeros((1, 1, 2, 2)), [1], np.zeros((1, 2, 1)), [[1, 1]], 4)
    _, placement = policy.write(PolicyState(rows=jnp.full((1, 2), NOT_STORED)), chunk)
    # Head 0 alone would drop slot 1, head 1 alone slot 0; together 0.55 against 0.45.
    weights = jnp.asarray([[[[0.8, 0.2, 0, 0]], [[0.3, 0.7, 0, 0]]]], jnp.float32)
    state = policy.observe(
        PolicyState(rows=jnp.zeros((1, 2), jnp.int32)), weights, chunk, placement, None
    )
    assert state.rows.tolist() == [[1, 1]]


PAGE_SIZE, WIDTH, TOKENS = 3, 4, 14
write_quest = jax.jit(lambda state, chunk: Quest(dense_layers=0).write(state, chunk))


@settings(max_examples=20)
@given(seed=st.integers(0, 2**20))
def test_quest_bounds_are_those_of_the_keys_on_each_page(seed):
    random = np.random.default_rng(seed)
    keys = random.normal(size=(2, TOKENS, 2, 4)).astype(np.float32)
    pages = -(-TOKENS // PAGE_SIZE)
    table = random.permutation(4 * pages).reshape(2, 2, pages)
    # The pages had owners before.
    stale = jnp.asarray(100 * random.normal(size=(4 * pages, 4)), jnp.float32)
    state = PolicyState(pages=PageBounds(low=stale, high=stale))
    done, lengths = np.zeros(2, int), np.zeros((2, 2), np.int32)
    while (done < TOKENS).any():
        count = np.minimum(random.integers(0, WIDTH + 1, 2), TOKENS - done)
        part = np.zeros((2, WIDTH, 2, 4), np.float32)
        for row in range(2):
            part[row, : count[row]] = keys[row, done[row] : done[row] + count[row]]
        state, placement = write_quest(state, chunk_of(part, count, table, lengths, PAGE_SIZE))
        done, lengths = done + count, np.asarray(placement.lengths)
        assert lengths.tolist() == [[int(row)] * 2 for row in done]
        low, high = np.asarray(state.pages.low), np.asarray(state.pages.high)
        query = random.normal(size=4).astype(np.float32)
        for row, head in np.ndindex(2, 2):
            used = table[row, head, : -(-done[row] // PAGE_SIZE)]
            bounds = np.maximum(query * low[used], query * high[used]).sum(-1)
            held = keys[row, : done[row], head]
            want = quest.page_bounds(query, held, PAGE_SIZE)
            np.testing.assert_allclose(bounds, want, rtol=1e-5, atol=1e-5)


def test_quest_reads_its_first_layers_whole():
    runs = Quest(budget=8, dense_layers=2).groups(5)
    assert [(start, end) for start, end, _ in runs] == [(0, 2), (2, 5)]
    assert runs[0][2].read_budget > 10**6
    assert runs[1][2].read_budget == 8
    assert [run[:2] for run in Quest(dense_layers=9).groups(3)] == [(0, 3)]
    assert [run[:2] for run in Quest(dense_layers=0).groups(3)] == [(0, 3)]
