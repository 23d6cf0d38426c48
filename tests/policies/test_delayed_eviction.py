"""DMS and all policies with delayed eviction, chunk by chunk against the simulation.

`write` is tested without a model: random marks, chunks of random counts (sometimes 0), shifts from
0 to window + 1. Compares exact slots, lengths and live counts after every token, and the keys
visible to each query of a chunk.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dms_jax.policies import DMS, RandomEviction
from dms_jax.policies.values import FOREVER, NOT_STORED, Decisions, PolicyState
from tests.oracles import dms
from tests.support.chunks import chunk_of, state_of, tokens_of
from tests.support.instances import further

BATCH, KV_HEADS, HEAD_DIM, PAGE_SIZE, LENGTH = 2, 2, 2, 4, 24


@jax.jit
def write(policy, rows, marks, first, count, lengths):
    """Runs one chunk through `write`; marks [B, K, T]."""
    num_tokens = marks.shape[-1]
    nothing = jnp.zeros((BATCH, num_tokens, KV_HEADS, HEAD_DIM))
    chunk = chunk_of(
        tokens_of(nothing, positions=first[:, None] + jnp.arange(num_tokens)),
        decisions=Decisions(marks=marks),
        count=count,
        page_table=jnp.zeros((BATCH, KV_HEADS, -(-LENGTH // PAGE_SIZE))),
        lengths=lengths,
        page_size=PAGE_SIZE,
    )
    state, placement = policy.write(PolicyState(rows=rows), chunk)
    return state.rows, placement


def check_chunks(policy, window, shift, marks, chunks, width):
    """Runs `chunks` (counts [B] each); marks [B, K, LENGTH]."""
    random = np.random.default_rng(0)
    rows = state_of(policy, BATCH, KV_HEADS, HEAD_DIM).rows
    lengths = np.zeros((BATCH, KV_HEADS), np.int32)
    seen = np.zeros(BATCH, np.int32)
    frozen = np.zeros_like(lengths)
    stored = {
        (b, k): np.full(LENGTH + PAGE_SIZE, -1) for b in range(BATCH) for k in range(KV_HEADS)
    }
    steps = {key: dms.slots_per_step(marks[key], window, shift) for key in stored}
    masks = {key: dms.visible(marks[key], window, shift) for key in stored}
    for counts in chunks:
        counts = np.minimum(counts, LENGTH - seen).astype(np.int32)
        chunk_marks = random.integers(0, 2, (BATCH, KV_HEADS, width)).astype(bool)  # padding too
        for b, count in enumerate(counts):
            chunk_marks[b, :, :count] = marks[b, :, seen[b] : seen[b] + count]
        rows, placement = write(policy, rows, chunk_marks, seen, counts, lengths)
        placement = {
            name: np.asarray(getattr(placement, name))
            for name in ("slots", "live", "lengths", "evicted", "past_until")
        }
        for (b, k), slots in stored.items():
            first, count = seen[b], counts[b]
            before = slots.copy()
            taken = placement["slots"][b, k]
            assert (taken[count:] == NOT_STORED).all()
            kept = taken[taken != NOT_STORED]
            assert len(set(kept)) == len(kept)
            for token in range(count):
                if taken[token] != NOT_STORED:
                    slots[taken[token]] = first + token
            wanted = steps[b, k][first + count - 1] if first + count else []
            lengths_now = placement["lengths"][b, k]
            chex.assert_trees_all_equal(slots[:lengths_now], np.array(wanted))
            live = [len(steps[b, k][first + token]) for token in range(count)]
            chex.assert_trees_all_equal(placement["live"][b, k, :count], np.array(live))
            until = placement["past_until"][b, k]
            for token in range(count):
                past = before[: lengths[b, k]][token <= until[: lengths[b, k]]]
                distance = token - np.arange(token + 1)
                own = (distance <= window) | ~placement["evicted"][b, k, : token + 1]
                sees = [*past, *(first + np.flatnonzero(own))]
                want = np.flatnonzero(masks[b, k][first + token])
                assert sorted(sees) == want.tolist()
            assert (until[lengths[b, k] :] == FOREVER).all()
            assert before[: frozen[b, k]].tolist() == slots[: frozen[b, k]].tolist()
        lengths, seen = placement["lengths"], seen + counts
        frozen = np.asarray(policy.frozen_slots(rows, lengths, seen))
        for (
            b,
            k,
        ), slots in stored.items():  # those before the last W tokens, the earliest possible
            recent = slots[: lengths[b, k]] >= seen[b] - window - 1
            assert frozen[b, k] == (np.argmax(recent) if seen[b] else 0)


@pytest.mark.parametrize(("window", "shift"), [(2, 1), *further((0, 0), (0, 1), (6, 2), (6, 7))])
@settings(max_examples=8)
@given(
    seed=st.integers(0, 2**20),
    rate=st.sampled_from([0.1, 0.5, 0.9, 1.0]),
    width=st.sampled_from([1, 16]),
)
def test_slots_lengths_and_visibility_equal_the_ring(window, shift, seed, rate, width):
    random = np.random.default_rng(seed)
    marks = random.random((BATCH, KV_HEADS, LENGTH)) < rate
    chunks = random.integers(0, width + 1, (3 * LENGTH // width, BATCH))
    check_chunks(DMS(window=window, shift=shift), window, shift, marks, chunks, width)


def shown(positions, layer=0, kv_heads=2):
    nothing = np.zeros((*np.shape(positions), kv_heads, HEAD_DIM))
    return tokens_of(nothing, positions=positions, layer=layer)


@functools.partial(jax.jit, static_argnums=3)
def drawn(policy, positions, layer, kv_heads=2):
    return policy.decide(shown(positions, layer, kv_heads)).marks


def test_random_eviction_draws_by_layer_head_position():
    policy = RandomEviction(rate=0.3, seed=5)
    positions = np.arange(4000)[None]
    whole = np.asarray(drawn(policy, positions, 0))
    part = drawn(policy, np.arange(1000, 1010)[None].repeat(3, 0), 0)
    chex.assert_trees_all_equal(part, np.repeat(whole[:, :, 1000:1010], 3, axis=0))
    other_layer = drawn(policy, positions, 1)
    other_seed = drawn(RandomEviction(rate=0.3, seed=6), positions, 0)
    # Independent draws with probability 0.3 agree in a fraction of 0.58, with deviation 0.008.
    draws = [whole[0, 0], whole[0, 1], np.asarray(other_layer)[0, 0], np.asarray(other_seed)[0, 0]]
    for index, draw in enumerate(draws):
        assert abs(draw.mean() - 0.3) < 0.03
        for other in draws[:index]:
            assert abs((draw == other).mean() - 0.58) < 0.035
        # Neighbouring positions are independent too.
        assert abs((draw[1:] == draw[:-1]).mean() - 0.58) < 0.035


@pytest.mark.parametrize(
    ("window", "shift", "seen"), [(2, 1, 21), *further((0, 0, 15), (6, 7, 21))]
)
def test_rows_at_a_length_equal_rows_grown_to_it(window, shift, seen):
    policy, size = DMS(window=window, shift=shift), window + 1
    marks = np.random.default_rng(seen).random((BATCH, KV_HEADS, LENGTH)) < 0.6
    empty = state_of(policy, BATCH, KV_HEADS, HEAD_DIM).rows
    nothing = np.zeros((BATCH, KV_HEADS), np.int32)
    first, count = np.zeros(BATCH, np.int32), np.full(BATCH, seen, np.int32)
    reached, _ = write(policy, empty, marks[..., :seen], first, count, nothing)
    last = np.arange(seen - size, seen)
    slots = np.zeros((BATCH, KV_HEADS, size), np.int32)
    for row in np.ndindex(BATCH, KV_HEADS):
        held = dms.slots_per_step(marks[row], window, shift)[seen - 1]
        slots[row] = [held.index(position) for position in last]
    # Token j + shift marks key j, so the newest keys are not marked yet.
    made = last + shift < seen
    evicted = made & marks[..., np.where(made, last + shift, 0)]
    rows = policy.rows_at(empty, jnp.asarray(slots), jnp.asarray(evicted), seen)
    chex.assert_trees_all_equal(rows, reached)


def test_random_eviction_spreads_rates_over_heads():
    marks = drawn(RandomEviction(rate=0.5, spread=0.4), np.arange(2000)[None], 0, 16)
    rates = np.asarray(marks).mean(-1)[0]
    assert rates.min() > 0.06
    assert rates.max() < 0.94
    assert rates.std() > 0.1
