"""The relaxation of a decision: the rows of the released code."""

import functools

import chex
import jax
import jax.numpy as jnp
import pytest

from dms_jax.policies.relaxation import log_keep, noisy_logits, straight_through


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


class ReleasedCodeTest(chex.TestCase):
    # logit, noise, their sum over the temperature, its sigmoid, the decision, log(1 - sigmoid)
    ROWS = (
        (-5, 0, -50, 1.93e-22, 0, -1.93e-22),
        (-5, 4, -10, 4.5398e-5, 0, -4.5399e-5),
        (-5, 6, 10, 0.9999546, 1, -10.0000454),
        (-3, 2.5, -5, 0.00669285, 0, -0.00671535),
        (1, -0.5, 5, 0.99330715, 1, -5.00671535),
    )

    @chex.variants(with_jit=True, without_jit=True)
    def test_gating_equals_released_code(self):
        logits, noise, noisy, alpha, hard, bias = jnp.asarray(self.ROWS).T
        found = self.variant(functools.partial(noisy_logits, temperature=0.1))(logits, noise)
        chex.assert_trees_all_close(found, noisy, rtol=1e-12)
        chex.assert_trees_all_close(jax.nn.sigmoid(found), alpha, rtol=1e-3)
        chex.assert_trees_all_close(self.variant(log_keep)(found), bias, rtol=1e-3)
        decide = jax.vmap(jax.value_and_grad(straight_through))
        value, gradient = self.variant(decide)(found)
        chex.assert_trees_all_equal(value, hard)
        chex.assert_trees_all_close(gradient, alpha * (1 - alpha), rtol=1e-2, atol=1e-20)
