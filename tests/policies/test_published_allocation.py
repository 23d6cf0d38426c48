"""AdaKV and PyramidKV against their authors' code, transcribed to NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest

from dms_jax.policies import AdaKV, PyramidKV, SnapKV
from tests.policies.test_allocation import token
from tests.support.chunks import chunk_of, tokens_of


def authors_adakv(scores: np.ndarray, budget: int, window: int, alpha: float) -> np.ndarray:
    """FFY0/AdaKV, `AdaptiveSnapKVCluster.update_kv`; scores [K, S] without the window. [K, S]."""
    base = budget - window
    order = np.argsort(-scores.ravel(), kind="stable")[: len(scores) * base]
    won = np.bincount(order // scores.shape[1], minlength=len(scores))
    capacity = np.round(won * (1 - alpha) + int(base * alpha)).astype(int)
    keep = np.zeros(scores.shape, bool)
    for head, count in enumerate(capacity):
        keep[head, np.argsort(-scores[head], kind="stable")[:count]] = True
    return keep


@pytest.fixture
def scores():
    """Two heads, one with scores a thousand times smaller, before a window of 32."""
    drawn = np.random.default_rng(0).random((4, 168)).astype(np.float32)
    return drawn * np.array([[1.0], [0.001], [0.001], [1.0]], np.float32)


@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("budget", [40, 96, 150])
def test_adakv_equals_the_authors_code(scores, alpha, budget):
    policy = AdaKV(SnapKV(window=32, budget=budget), alpha=alpha, rule="published")
    whole = np.concatenate([scores, np.full((4, 32), np.inf, np.float32)], axis=1)
    found = np.asarray(policy.select(jnp.asarray(whole)[None], jnp.asarray([[budget]]), token()))[0]
    assert found[:, 168:].all()
    assert (found[:, :168] == authors_adakv(scores, budget, 32, alpha)).all()
    assert abs(found.sum() - 4 * budget) <= 4


def test_published_guarantee_excludes_window(scores):
    whole = np.concatenate([scores, np.full((4, 32), np.inf, np.float32)], axis=1)
    kept = {}
    for rule in ("published", "kvpress"):
        policy = AdaKV(SnapKV(window=32, budget=96), alpha=0.2, rule=rule)
        mask = policy.select(jnp.asarray(whole)[None], jnp.asarray([[96]]), token())
        kept[rule] = np.asarray(mask)[0].sum(-1)
    assert kept["kvpress"][[1, 2]].tolist() == [32, 32]
    assert kept["published"][[1, 2]].tolist() == [44, 44]  # 32 + int(0.2 * 64)


def budgets(policy, seen: int, layers: int) -> np.ndarray:
    def chunk(layer):
        tokens = tokens_of(np.zeros((1, 1, 1, 2)), positions=[[seen - 1]], layer=layer)
        return chunk_of(tokens, max_lengths=(seen,), page_size=4, num_layers=layers)

    return np.array([int(policy.layer_budget(chunk(n))[0, 0]) for n in range(layers)])


@pytest.mark.parametrize("seen", [1500, 2048, 3000, 4000, 8000])
def test_pyramidkv_redistributes_budget_of_short_texts(seen):
    """We round so that the mean is at most the budget; the authors round the slope."""
    budget, window, layers = 2048, 64, 32
    low = (budget - window) // 20
    high = 2 * (budget - window) - low
    if high >= seen - window:
        high = max(seen - window, budget - window)
        low = 2 * (budget - window) - high
    step = (high - low) / (layers - 1)
    want = [window + np.floor(high - n * step + 1e-9) for n in range(layers)]
    policy = PyramidKV(SnapKV(budget=budget, window=window), redistribute=True)
    found = budgets(policy, seen, layers)
    assert found.tolist() == want
    assert budget - 1 < found.mean() <= budget
    left = budgets(PyramidKV(SnapKV(budget=budget, window=window)), seen, layers)
    unused = np.minimum(left, seen).sum()
    assert np.minimum(found, seen).sum() >= unused
    assert (seen >= 4000) == (found.tolist() == left.tolist())
