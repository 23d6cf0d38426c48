"""Tokens packed without padding, against NumPy, and their logits in a pass."""

import chex
import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np

from dms_jax.model.unpadded import Unpadded
from dms_jax.policies.values import Tokens

# Sequences, width and places: each combination compiles programs, the counts do not.
SHAPES = [(1, 1, 3), (1, 9, 9), (5, 4, 12), (7, 9, 40)]


@st.composite
def lines(draw):
    """Counts of some sequences, a width, and at least as many places as there are tokens."""
    sequences, width, places = draw(st.sampled_from(SHAPES))
    counts = draw(st.lists(st.integers(0, width), min_size=sequences, max_size=sequences))
    within = np.diff(np.minimum(np.cumsum(counts), places), prepend=0)
    return within.astype(np.int32), width, places


@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(lines())
def test_tokens_are_packed_and_unpacked(case):
    counts, width, places = case
    random = np.random.default_rng(0)
    x = random.normal(size=(len(counts), width, 3)).astype(np.float32)
    valid = np.arange(width) < counts[:, None]
    poisoned = np.where(valid[..., None], x, np.nan)  # nothing of the padding is read
    line = Unpadded.of(jnp.asarray(counts), width, places)
    want = np.zeros((1, places, 3), np.float32)
    want[0, : counts.sum()] = np.concatenate(
        [one[:count] for one, count in zip(x, counts, strict=True)]
    )
    chex.assert_trees_all_equal(np.asarray(line.unpad(jnp.asarray(poisoned))), want)
    want[0, counts.sum() :] = np.nan
    chex.assert_trees_all_equal(
        np.asarray(line.pad(jnp.asarray(want))), np.where(valid[..., None], x, np.float32(0))
    )
    ends = np.cumsum(counts)
    chex.assert_trees_all_equal(np.asarray(line.last)[counts > 0], (ends - 1)[counts > 0])
    assert (np.asarray(line.last) >= 0).all()
    assert (np.asarray(line.last) < places).all()


def test_packing_keeps_positions_and_logits():
    counts, width, places = jnp.array([2, 0, 3]), 4, 6
    line = Unpadded.of(counts, width, places)
    assert line.place_of[line.is_token].tolist() == [0, 1, 2, 3, 4]
    assert line.is_token.sum(1).tolist() == [2, 0, 3]
    assert line.token_at[line.is_taken].tolist() == [0, 1, 8, 9, 10]
    chex.assert_trees_all_equal(line.last, np.array([1, 1, 4]))
    random = np.random.default_rng(0)
    q, k, v = (random.normal(size=(1, places, heads, 2)).astype(np.float32) for heads in (4, 2, 2))
    logits, late = random.normal(size=(2, 1, 2, places)).astype(np.float32)
    positions = np.arange(12).reshape(3, 4)
    tokens = Tokens(
        *map(jnp.asarray, (q, k, v, np.zeros((1, places), int), 0)),
        adapter_logits=jnp.asarray(logits),
        late_logits=jnp.asarray(late),
    )
    padded = line.pad_tokens(tokens, jnp.asarray(positions))
    for got, own in ((padded.q, q), (padded.k, k), (padded.v, v)):
        chex.assert_trees_all_equal(np.asarray(got[2, :3]), own[0, 2:5])
        assert not np.asarray(got[1]).any()
    for got, own in ((padded.adapter_logits, logits), (padded.late_logits, late)):
        chex.assert_trees_all_equal(np.asarray(got[2, :, :3]), own[0, :, 2:5])
        assert not np.asarray(got[0, :, 2:]).any()
    chex.assert_trees_all_equal(np.asarray(padded.positions), positions)
