"""DMS, and all policies built on delayed eviction, chunk by chunk against the simulation.

`write` is tested without a model: random marks, chunks of random counts (sometimes 0), shifts from
0 to window + 1. The exact slots, the lengths and live counts after every token, and the keys
visible to each query of a chunk are compared.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dms_jax.policies import DMS, RandomEviction
from dms_jax.policies.values import Decisions, PolicyState
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


@pytest.mark.parametrize(
    ("window", "shift", "seen"), [(2, 1, 21), *further((0, 0, 15), (6, 7, 21))]
)
def test_rows_at_a_length_are_those_that_came_to_it(window, shift, seen):
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
    # Token j + shift marks key j, so the newest keys have no marks yet.
    made = last + shift < seen
    evicted = made & marks[..., np.where(made, last + shift, 0)]
    rows = policy.rows_at(empty, jnp.asarray(slots), jnp.asarray(evicted), seen)
    chex.assert_trees_all_equal(rows, reached)


def shown(positions, layer=0, kv_heads=2):
    nothing = np.zeros((*np.shape(positions), kv_heads, HEAD_DIM))
    return tokens_of(nothing, positions=positions, layer=layer)


@functools.partial(jax.jit, static_argnums=3)
def drawn(policy, positions, layer, kv_heads=2):
    return policy.decide(shown(positions, layer, kv_heads)).marks


def test_random_eviction_draws_by_layer_head_and_position_alone():
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


def test_random_eviction_spreads_rates_over_heads():
    marks = drawn(RandomEviction(rate=0.5, spread=0.4), np.arange(2000)[None], 0, 16)
    rates = np.asarray(marks).mean(-1)[0]
    assert rates.min() > 0.06
    assert rates.max() < 0.94
    assert rates.std() > 0.1
