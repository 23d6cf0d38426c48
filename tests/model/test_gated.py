"""The gated activation of the feed-forward against NumPy in float64."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dms_jax.model.layers import gated


def expected(gate_up: np.ndarray, gradient: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns silu(gate) * up, and the gradients of gate and up."""
    gate, up = gate_up[..., 0, :], gate_up[..., 1, :]
    share = 1 / (1 + np.exp(-gate))
    of_gate = gradient * up * share * (1 + gate * (1 - share))
    return gate * share * up, np.stack([of_gate, gradient * gate * share], -2)


def values(dtype) -> tuple[jax.Array, jax.Array]:
    """Returns gate and up, some of them large, and a gradient, rounded to the dtype."""
    random = np.random.default_rng(0)
    gate_up = random.normal(size=(3, 5, 2, 7)) * [[4.0], [1.0]]
    gate_up[0, 0, 0, :2] = 60, -60
    return jnp.asarray(gate_up, dtype), jnp.asarray(random.normal(size=(3, 5, 7)), dtype)


@pytest.mark.parametrize(
    ("dtype", "rtol", "atol"),
    [
        (jnp.float64, 1e-12, 1e-14),
        (jnp.float32, 1e-5, 1e-5),
        # The gradient is rounded once.
        (jnp.bfloat16, 2**-8, 1e-5),
    ],
)
def test_the_gradient_equals_numpy(dtype, rtol, atol):
    with jax.enable_x64(True):
        gate_up, gradient = values(dtype)
        wide = [np.asarray(x, np.float64) for x in (gate_up, gradient)]
        out, backward = jax.vjp(gated, gate_up)
        (found,) = backward(gradient)
        assert out.dtype == found.dtype == dtype
        value, slope = expected(*wide)
        # Three operations of the forward pass round.
        chex.assert_trees_all_close(np.asarray(out, np.float64), value, rtol=4 * rtol, atol=atol)
        chex.assert_trees_all_close(np.asarray(found, np.float64), slope, rtol=rtol, atol=atol)
