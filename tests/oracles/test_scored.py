"""The oracle of policies that score tokens, against examples by hand."""

import chex
import numpy as np
import pytest

from tests.oracles import scored, vanilla
from tests.oracles.examples import tensors


def lengths_of(trace, head=0):
    return [len(step[head]) for step in trace.live], [len(step[head]) for step in trace.kept]


def test_prompt_and_answer_cuts():
    q, k, v = tensors(0, length=12)
    trace = scored.simulate(q, k, v, 6, worth=scored.knorm(k), budget=3, interval=2)
    live, kept = lengths_of(trace)
    assert live == [1, 2, 3, 4, 5, 6, 4, 5, 4, 5, 4, 5]
    assert kept == [1, 2, 3, 4, 5, 3, 4, 3, 4, 3, 4, 3]
    chex.assert_trees_all_close(trace.outputs[:6], vanilla.simulate(q, k, v).outputs[:6], rtol=1e-7)
    once = scored.simulate(q, k, v, 6, worth=scored.knorm(k), budget=3, interval=None)
    assert lengths_of(once)[1][5:] == [3, 4, 5, 6, 7, 8, 9]
    never = scored.simulate(q, k, v, 0, worth=scored.knorm(k), budget=3, interval=None)
    assert lengths_of(never)[1] == list(range(1, 13))


def test_knorm_keeps_smallest_keys_in_order():
    k = np.array([3.0, 1, 2, 5, 0.5])[:, None, None] * np.array([0.6, 0.8])
    trace = scored.simulate(k, k, k, 5, worth=scored.knorm(k), budget=3, interval=None)
    assert trace.kept[-1] == [[1, 2, 4]]


def test_keydiff_keeps_unlike_keys():
    # Directions: three to the right, one up, one to the left: the mean points right and up.
    k = np.array([[1.0, 0], [2, 0], [0, 3], [4, 0], [-1, 0]])[:, None]
    scores = scored.keydiff(k)(4, [[0, 1, 2, 3, 4]])[0]
    length = np.hypot(2, 1)  # the mean is (2, 1) / 5
    chex.assert_trees_all_close(
        scores,
        np.array([-2 / length, -2 / length, -1 / length, -2 / length, 2 / length]),
        rtol=1e-7,
    )
    trace = scored.simulate(k, k, k, 5, worth=scored.keydiff(k), budget=2, interval=None)
    assert trace.kept[-1] == [[2, 4]]


def test_snapkv_pools_the_votes_of_the_window():
    # One head of one dim, scale 1: with q = 1 key j weighs exp(k_j).
    weights = np.array([1.0, 2, 5, 1, 1, 4, 2])
    k = np.log(weights)[:, None, None]
    q = np.ones_like(k)
    scores = scored.snapkv(q, k, window=2, kernel=3)(6, [list(range(7))])[0]
    # Query 5 sees 14 in all, query 6 sees 16: old tokens get w / 14 and w / 16, averaged.
    votes = weights[:5] * (1 / 14 + 1 / 16) / 2
    pooled = [votes[:2].sum(), votes[:3].sum(), votes[1:4].sum(), votes[2:].sum(), votes[3:].sum()]
    chex.assert_trees_all_close(
        scores, np.array([*np.array(pooled) / 3, np.inf, np.inf]), rtol=1e-7
    )


def test_snapkv_scores_after_an_earlier_cut():
    """Checks scores after an earlier cut, where slots no longer equal positions."""
    q, k, _ = tensors(4, length=9)
    ids = [[0, 3, 7, 8], [1, 2, 7, 8]]
    scores = scored.snapkv(q, k, window=2, kernel=1)(8, ids)
    logits = np.array(
        [[k[j, 1] @ q[i, h] / np.sqrt(6) for j in ids[1]] for i in (7, 8) for h in (2, 3)]
    )
    logits[:2, 3] = -np.inf  # query 7 does not see key 8
    weights = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    chex.assert_trees_all_close(scores[1][:2], weights[:, :2].mean(0), rtol=1e-7)


def test_expected_attention_equals_a_gaussian_mean():
    """Samples E exp(q k) of a Gaussian q; with one future position R is a rotation."""
    random = np.random.default_rng(5)
    queries, k, v = tensors(6, length=40, query_heads=1, kv_heads=1, dim=4)
    ids = list(range(40))
    options = dict(theta=100.0, sinks=1, recent=0, future=1, epsilon=0.0)
    scores = scored.expected_attention(queries, k, v, covariance=True, **options)(39, [ids])[0]
    past = queries[1:, 0]
    drawn = random.multivariate_normal(past.mean(0), np.cov(past.T, bias=True), 400_000)
    cos, sin = scored.rope.angles([40], 4, 100.0)
    turned = scored.rope.rotate(drawn, cos, sin)
    expected = np.exp(turned @ k[1:, 0].T / 2).mean(0)
    expected *= np.linalg.norm(v[1:, 0], axis=-1) / expected.sum()
    assert scores[0] == np.inf
    chex.assert_trees_all_close(scores[1:], expected, rtol=0.03)
    plain = scored.expected_attention(queries, k, v, covariance=False, **options)(39, [ids])[0]
    assert np.abs(plain[1:] / expected - 1).max() > 0.1


def test_heads_compete_beyond_their_guarantee():
    worth = [np.array([9.0, 8, 7, 6]), np.array([1.0, 5, 2, 3])]
    held = [[0, 1, 2, 3], [0, 1, 2, 3]]
    assert scored.cut(held, worth, 2, alpha=0.0) == [[0, 1, 2, 3], []]
    assert scored.cut(held, worth, 2, alpha=0.5) == [[0, 1, 2], [1]]
    assert scored.cut(held, worth, 2, alpha=1.0) == [[0, 1], [1, 3]]
    assert scored.cut(held, worth, 2, alpha=None) == [[0, 1], [1, 3]]


@pytest.mark.parametrize(("budget", "protected", "beta"), [(64, 8, 20), (100, 0, 7), (33, 32, 20)])
def test_pyramid_spends_exactly_its_budget(budget, protected, beta):
    layers = [scored.pyramid(budget, protected, beta, layer, 12) for layer in range(12)]
    assert layers == sorted(layers, reverse=True)
    assert budget - 1 < np.mean(layers) + 1 <= budget + 1
    assert layers[-1] == max(1, protected + (budget - protected) // beta)
    assert scored.pyramid(budget, protected, beta, 0, 1) == budget
