"""The DMC oracle against examples worked by hand and second derivations."""

import chex
import numpy as np
import pytest

from tests.oracles import dmc, rope
from tests.oracles.examples import tensors
from tests.oracles.trace import softmax


def test_dmc_merges_by_weight():
    # One head of dims (payload, 0, 0, neuron). Decisions: open, merge, open, merge, merge.
    merge_logit = [9.0, 6.0, 4.0, 6.0, 6.0]  # The first is forced to open, 5 is the threshold.
    importance_logit = np.array([0.0, 1.0, -1.0, -5.0, 2.0])
    k = np.array(
        [
            [[payload, 0, 0, neuron]]
            for payload, neuron in zip([1, 2, 3, 4, 5], merge_logit, strict=True)
        ]
    )
    q = np.array([[[1.0, 0, 0, neuron]] for neuron in importance_logit])
    v = np.array([[[10.0 * payload, 0, 0, 7.0]] for payload in [1, 2, 3, 4, 5]])
    cos, sin = np.ones((5, 2)), np.zeros((5, 2))
    trace = dmc.simulate(q, k, v, cos=cos, sin=sin, epsilon=0.01)
    assert [step[0] for step in trace.live] == [[0], [1], [1, 2], [1, 3], [1, 4]]
    omega = 1 / (1 + np.exp(-(importance_logit + 5))) + 0.01
    first = (omega[0] * 1 + omega[1] * 2) / (omega[0] + omega[1])
    second = (omega[2:] @ [3, 4, 5]) / omega[2:].sum()
    weights = softmax(np.array([first, second]) / 2)
    chex.assert_trees_all_close(
        trace.outputs[4, 0, 0], weights @ [10 * first, 10 * second], rtol=1e-7
    )
    chex.assert_trees_all_close(trace.outputs[4, 0, 3], 7.0, rtol=1e-7)
    chex.assert_trees_all_equal(trace.peak, np.array([2]))


def test_dmc_importance_is_the_mean_logit_of_the_group():
    q = np.zeros((1, 4, 3))
    q[0, :, -1] = [1.0, 3.0, -7.0, -5.0]
    got = dmc.importance_weights(q, 2, epsilon=0.0)
    chex.assert_trees_all_close(
        got, np.array([[1 / (1 + np.exp(-7)), 1 / (1 + np.exp(1))]]), rtol=1e-7
    )
    first = dmc.importance_weights(q, 2, neuron=0, epsilon=0.0)
    chex.assert_trees_all_close(first, np.full((1, 2), 1 / (1 + np.exp(-5))), rtol=1e-7)


def dmc_tensors(seed, length=40):
    q, k, v = tensors(seed, length=length)
    k[:, :, -1] = (
        5 + np.random.default_rng(seed + 1).normal(size=k.shape[:2]) + 1.2
    )  # Mostly merges: long segments.
    q[:, :, -1] *= 4
    return q, k, v, *rope.angles(np.arange(length), 6)


@pytest.mark.parametrize("window", [None, 1, 3, 12])
def test_dmc_steps_equal_closed_form(window):
    q, k, v, cos, sin = dmc_tensors(5)
    trace = dmc.simulate(q, k, v, cos=cos, sin=sin, window=window)
    alpha = (dmc.merge_logits(k) > 0).astype(float)
    with np.errstate(divide="ignore"):
        log_keep = np.log(1 - alpha)
    soft = dmc.soft_attention(
        q, k, v, alpha, dmc.importance_weights(q, 2), log_keep, cos=cos, sin=sin, window=window
    )
    chex.assert_trees_all_close(trace.outputs, soft, rtol=1e-7, atol=1e-12)
    expected = [
        [1 + np.count_nonzero(alpha[1 : t + 1, head] == 0) for head in (0, 1)] for t in range(40)
    ]
    chex.assert_trees_all_equal(trace.live_counts, np.array(expected))


def test_dmc_window_forgets_the_start_of_a_long_segment():
    x = np.arange(17.0)[:, None]
    ones = np.ones(17)
    chex.assert_trees_all_close(
        dmc.pool(x, ones, ones, window=12)[-1], np.array([np.arange(5, 17).mean()]), rtol=1e-7
    )
    chex.assert_trees_all_close(dmc.pool(x, ones, ones)[-1], np.array([8.0]), rtol=1e-7)


def test_dmc_fixed_pooling():
    q, k, v, cos, sin = dmc_tensors(8, length=7)
    merge, weights = dmc.fixed_pooling(7, 2, every=3)
    trace = dmc.simulate(
        q, k, v, cos=cos, sin=sin, neuron=None, decisions=merge, importance=weights
    )
    assert [step[0] for step in trace.live] == [[0], [1], [2], [2, 3], [2, 4], [2, 5], [2, 5, 6]]
    pooled = np.stack([k[0:3].mean(0), k[3:6].mean(0), k[6]])
    rotated = rope.rotate_tokens(pooled, cos[[2, 5, 6]], sin[[2, 5, 6]])
    values = np.stack([v[0:3].mean(0), v[3:6].mean(0), v[6]])
    query = rope.rotate(q[6, 3], cos[6], sin[6])
    expected = softmax(rotated[:, 1] @ query / np.sqrt(6)) @ values[:, 1]
    chex.assert_trees_all_close(trace.outputs[6, 3], expected, rtol=1e-7, atol=1e-12)
