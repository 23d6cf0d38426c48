"""The worked examples of DMS, slot by slot through the policy itself."""

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from dms_jax.policies import DMS
from dms_jax.policies.values import Decisions
from tests.support.chunks import chunk_of, state_of, tokens_of, write


def cache_states(policy: DMS, marks: list[int]) -> list[list[int]]:
    """Returns the tokens in each slot after every step of one row."""
    state = state_of(policy, 1, 1, 2)
    lengths = jnp.zeros((1, 1), jnp.int32)
    slots: dict[int, int] = {}
    states = []
    for token, mark in enumerate(marks):
        chunk = chunk_of(
            tokens_of(np.zeros((1, 1, 1, 2)), positions=[token]),
            decisions=Decisions(marks=jnp.full((1, 1, 1), bool(mark))),
            page_table=[[[0, 0]]],
            lengths=lengths,
            page_size=4,
        )
        state, placement = write(policy, state, chunk)
        slots[int(placement.slots[0, 0, 0])] = token
        lengths = placement.lengths
        assert len(slots) == int(lengths[0, 0]) == int(placement.live[0, 0, 0])
        states.append([slots[slot] for slot in range(len(slots))])
    return states


def test_decisions_shifted_by_one_overwrite_in_place():
    # Token t + 1 decides for key t: keys 1, 2 and 5 are marked, and leave after window 2.
    states = cache_states(DMS(window=2, shift=1), [1, 0, 1, 1, 0, 0, 1, 0])
    assert [len(state) for state in states] == [1, 2, 3, 4, 4, 4, 5, 6]  # 29 reads, peak 6
    assert states[4] == [0, 4, 2, 3]
    assert states[5] == [0, 4, 5, 3]
    assert states[7] == [0, 4, 5, 3, 6, 7]


def test_six_states_of_the_cache():
    # The tokens A to F with their retention probabilities; each decides for itself, and logits are
    # those of the eviction probability.
    keep = np.array([0.2, 0.9, 0.3, 0.8, 0.1, 0.95])
    policy = DMS(window=2, shift=0, source="adapter", alpha_scale=1.0, alpha_offset=0.0)
    logits = jnp.asarray(np.log(1 - keep) - np.log(keep))[None, None]
    decisions = policy.decide(tokens_of(np.zeros((1, 6, 1, 2)), adapter_logits=logits))
    chex.assert_trees_all_equal(
        decisions.marks[0, 0], np.array([True, False, True, False, True, False])
    )
    states = cache_states(policy, decisions.marks[0, 0].tolist())
    named = ["".join(sorted("ABCDEF"[token] for token in state)) for state in states]
    assert named == ["A", "AB", "ABC", "BCD", "BCDE", "BDEF"]
    # E is marked and still within the window: two tokens later three of the six are left.
    later = cache_states(policy, [*decisions.marks[0, 0].tolist(), False, False])
    assert sorted(set(later[-1]) & set(range(6))) == [1, 3, 5]


@pytest.mark.parametrize(("window", "length"), [(64, 4096), (512, 4096), (0, 600), (64, 600)])
def test_compression_depends_on_the_window(window, length):
    # With a fraction f evicted, (w + 1) + (1 - f)(T - w - 1) of T tokens are kept.
    policy = DMS(window=window, shift=0)
    marks = np.arange(length) % 8 != 0  # 7 of 8
    tokens = 512
    state = state_of(policy, 1, 1, 2)
    lengths = jnp.zeros((1, 1), jnp.int32)
    for first in range(0, length, tokens):
        part = np.zeros(tokens, bool)
        count = min(tokens, length - first)
        part[:count] = marks[first : first + count]
        chunk = chunk_of(
            tokens_of(np.zeros((1, tokens, 1, 2)), positions=first + np.arange(tokens)),
            decisions=Decisions(marks=jnp.asarray(part)[None, None]),
            count=[count],
            page_table=np.zeros((1, 1, length)),
            lengths=lengths,
        )
        state, placement = write(policy, state, chunk)
        lengths = placement.lengths
    far = length - window - 1
    assert int(lengths[0, 0]) == window + 1 + int((~marks[:far]).sum())
