"""The DMS oracle against examples worked by hand and second derivations."""

import chex
import numpy as np
import pytest

from tests.oracles import dms, rope, vanilla
from tests.oracles.examples import tensors


def test_dms_mask_example():
    # d = decisions, e_k = d_{k+1} marks key k; window 2, so three keys are always visible.
    decisions = [1, 0, 1, 1, 0, 0, 1, 0]
    mask = dms.visible(decisions, window=2, shift=1)
    assert [np.flatnonzero(row).tolist() for row in mask] == [
        [0],
        [0, 1],
        [0, 1, 2],
        [0, 1, 2, 3],
        [0, 2, 3, 4],
        [0, 3, 4, 5],
        [0, 3, 4, 5, 6],
        [0, 3, 4, 5, 6, 7],
    ]
    steps = dms.slots_per_step(decisions, window=2, shift=1)
    assert [len(slots) for slots in steps] == [1, 2, 3, 4, 4, 4, 5, 6]
    assert sum(len(slots) for slots in steps) == 29
    assert steps[4] == [0, 4, 2, 3]
    assert steps[5] == [0, 4, 5, 3]
    assert steps[7] == [0, 4, 5, 3, 6, 7]


def test_dms_six_cache_states():
    # Retention probabilities of A..F; a token is kept above one half, window 2, its own decision.
    keep = np.array([0.2, 0.9, 0.3, 0.8, 0.1, 0.95]) > 0.5
    steps = dms.slots_per_step((~keep).astype(int), window=2, shift=0)
    states = ["".join(sorted("ABCDEF"[token] for token in slots)) for slots in steps]
    assert states == ["A", "AB", "ABC", "BCD", "BCDE", "BDEF"]


@pytest.mark.parametrize("window", [0, 1, 2, 5, 40])
def test_dms_ring_equals_the_mask(window):
    random = np.random.default_rng(window)
    for shift in range(window + 2):
        decisions = random.integers(0, 2, size=31)
        mask = dms.visible(decisions, window, shift)
        for slots, row in zip(dms.slots_per_step(decisions, window, shift), mask, strict=True):
            assert sorted(slots) == np.flatnonzero(row).tolist()


def test_dms_outputs_equal_training_with_hard_mask():
    q, k, v = tensors(1)
    decisions = np.random.default_rng(2).integers(0, 2, size=(13, 2))
    trace = dms.simulate(q, k, v, decisions=decisions, window=3, shift=1)
    bias = np.where(decisions == 1, -np.inf, 0.0)
    soft = dms.soft_attention(q, k, v, bias, window=3, shift=1)
    chex.assert_trees_all_close(trace.outputs, soft, rtol=1e-7, atol=1e-12)
    dense = vanilla.simulate(q, k, v).outputs
    with pytest.raises(AssertionError, match="Values not approximately equal"):
        chex.assert_trees_all_close(trace.outputs, dense, rtol=1e-5, atol=1e-8)


def test_dms_per_layer_takes_the_first_head():
    q, k, v = tensors(1)
    decisions = np.random.default_rng(2).integers(0, 2, size=(13, 2))
    trace = dms.simulate(q, k, v, decisions=decisions, window=1, per="layer")
    assert all(step[0] == step[1] for step in trace.live)
    alone = dms.simulate(q, k, v, decisions=decisions, window=1)
    assert [step[0] for step in trace.live] == [step[0] for step in alone.live]
    assert trace.live != alone.live


def test_dms_compression_loss_is_one_sided_and_global():
    decisions = np.zeros((2, 2, 1, 4))
    decisions[0, 0] = 1.0  # Sample 0: layer 0 evicts all, layer 1 nothing: a share of one half.
    assert dms.compression_loss(decisions, 0.5) == pytest.approx((0.0 + 0.5) / 2)
    assert dms.compression_loss(decisions, 0.75) == pytest.approx((0.25 + 0.75) / 2)
    assert dms.compression_loss(np.ones((1, 1, 1, 4)), 0.5) == 0.0


def test_dms_query_neuron_is_zeroed_around_the_rotation():
    q, k, _ = tensors(4)
    cos, sin = rope.angles(np.arange(13), 6)
    logits, rotated, keys = dms.from_query_neuron(q, k, cos, sin)
    chex.assert_trees_all_close(logits, q[:, [0, 2], 5] * 100 - 5, rtol=1e-7)
    assert (rotated[:, [0, 2], 5] == 0).all()
    # The neuron must not leak into the dim it rotates with.
    chex.assert_trees_all_close(rotated[:, [0, 2], 2], q[:, [0, 2], 2] * cos[:, None, 2], rtol=1e-7)
    chex.assert_trees_all_close(
        rotated[:, [1, 3]], rope.rotate_tokens(q, cos, sin)[:, [1, 3]], rtol=1e-7
    )
    chex.assert_trees_all_close(keys, rope.rotate_tokens(k, cos, sin), rtol=1e-7)


def test_dms_decides_strictly_above_zero():
    chex.assert_trees_all_equal(dms.decide([-0.1, 0.0, 1e-9]), np.array([0, 0, 1]))
