"""The compression loss against NumPy, and by hand."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dms_jax.training.compression_loss import compression_loss, evicted_shares
from tests.oracles import dms


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


def test_shares_ignore_padding():
    decisions = np.zeros((2, 2, 1, 4))
    decisions[0, 0, 0] = [1, 1, 0, 0]
    decisions[1, 0, 0] = [1, 0, 0, 0]
    decisions[1, 1, 0] = [0, 0, 0, 1]
    decisions = jnp.asarray(decisions)
    chex.assert_trees_all_close(
        evicted_shares(decisions)[..., 0], np.array([[0.5, 0], [0.25, 0.25]]), rtol=1e-7
    )
    valid = jnp.asarray([[True, True, False, False], [True, True, True, True]])
    chex.assert_trees_all_close(
        evicted_shares(decisions, valid)[..., 0], np.array([[1, 0], [0.5, 0.25]]), rtol=1e-7
    )


def draw(seed=0):
    """Decisions [L, B, K, T] whose shares differ by layer, sequence and head."""
    random = np.random.default_rng(seed)
    rates = random.random((3, 4, 2, 1))
    return (random.random((3, 4, 2, 11)) < rates).astype(float)


@pytest.mark.parametrize("ratio", [1, 1.5, 2, 4])
def test_loss_equals_numpy(ratio):
    decisions = draw()
    shares, target = evicted_shares(jnp.asarray(decisions)), 1 - 1 / ratio
    found = compression_loss(shares, target)
    chex.assert_shape(found, (4,))
    want = dms.compression_loss(decisions, target)
    chex.assert_trees_all_close(found.mean(), want, rtol=1e-12)


def test_the_gradient_without_decisions_is_finite():
    nothing = jnp.zeros((2, 1, 3))
    pull = jax.grad(lambda x: compression_loss(x, 0.5).sum())(nothing)
    chex.assert_tree_all_finite(pull)
    assert (pull < -0.1).all()


def test_no_gradient_beyond_the_target():
    back = jax.grad(lambda x: compression_loss(x, 0.5).sum())(jnp.full((2, 1, 3), 0.9))
    assert not np.any(back)
