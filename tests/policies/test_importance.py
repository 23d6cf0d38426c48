"""The importance that scorers learn, against its definition."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dms_jax.policies import importance
from dms_jax.policies.values import FutureAttention
from tests.oracles import importance as oracle
from tests.support.instances import further


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


LENGTH, KV_HEADS, GROUP, HEAD_DIM, EMBED = 13, 2, 3, 4, 6


def tensors(seed: int):
    random = np.random.default_rng(seed)
    q = 2 * random.normal(size=(LENGTH, KV_HEADS * GROUP, HEAD_DIM))
    k = 2 * random.normal(size=(LENGTH, KV_HEADS, HEAD_DIM))
    v = random.normal(size=(LENGTH, KV_HEADS, HEAD_DIM))
    inputs = random.normal(size=(LENGTH, EMBED))
    output = random.normal(size=(KV_HEADS * GROUP, HEAD_DIM, EMBED))
    return q, k, v, inputs, output


def computed(seeds, *, documents=None, **options):
    q, k, v, inputs, output = (np.stack(x) for x in zip(*map(tensors, seeds), strict=True))
    norms = [
        np.linalg.norm(np.einsum("BTD,BDE->BTE", v[:, :, h // GROUP], output[:, h]), axis=-1)
        for h in range(KV_HEADS * GROUP)
    ]
    return importance.importance(
        jnp.asarray(q),
        jnp.asarray(k),
        jnp.asarray(np.stack(norms, axis=-1)),
        jnp.asarray(np.linalg.norm(inputs, axis=-1)),
        seen_as=FutureAttention(**options),
        scale=HEAD_DIM**-0.5,
        segment_ids=None if documents is None else jnp.asarray(documents),
    )


@pytest.mark.parametrize("reduction", ["max", "mean"])
@pytest.mark.parametrize(("window", "block"), [(3, 4), *further((0, 128))])
def test_importance_equals_its_definition(monkeypatch, reduction, window, block):
    monkeypatch.setattr(importance, "BLOCK", block)
    documents = np.array([[1] * 13, [1] * 8 + [2] * 5])
    got = computed((0, 1), documents=documents, window=window, reduction=reduction)
    for row in range(2):
        want, known = oracle.log_importance(
            *tensors(row), window=window, reduction=reduction, documents=documents[row]
        )
        chex.assert_trees_all_equal(np.asarray(got.known[row]), known)
        assert 0 < known.sum() < LENGTH
        chex.assert_trees_all_close(np.asarray(got.log[row]).T[known], want[known], rtol=1e-10)


def test_a_worked_example():
    """Two tokens, then a query that gives them a quarter and three quarters of its attention."""
    q = np.array([0.0, 0.0, np.log(3)])[:, None, None]
    k = np.array([0.0, 1.0, -1e9])[:, None, None]
    v = np.array([2.0, 4.0, 1.0])[:, None, None]
    inputs, output = np.array([[1.0], [1.0], [2.0]]), np.ones((1, 1, 1))
    log, known = oracle.log_importance(q, k, v, inputs, output, window=0, scale=1.0)
    assert known.tolist() == [True, True, False]
    # Token 0: query 1 gives it a half of its attention: 2 / 2 / 1; query 2: 2 / 4 / 2.
    chex.assert_trees_all_close(np.exp(log[:2, 0]), np.array([1.0, 1.5]), rtol=1e-12)


def test_importance_has_no_gradient():
    def total(k):
        seen_as = FutureAttention(window=1)
        ones = jnp.ones((1, 5, 1))
        found = importance.importance(k, k, ones, ones[..., 0], seen_as=seen_as, scale=1.0)
        return jnp.where(found.known[:, None], found.log, 0).sum()

    k = jnp.asarray(np.random.default_rng(0).normal(size=(1, 5, 1, 2)))
    assert not np.asarray(jax.grad(total)(k)).any()
