"""Products of a single vector."""

import chex
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from dms_jax.model.layers import Linear, product


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_single_narrow_vector_has_the_product_that_it_has_beside_others(dtype):
    inputs, outputs = {"heads": 3, "head_dim": 32}, {"embed": 200}
    linear = Linear(inputs, outputs, bias=True, dtype=dtype, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (2, 1, 3, 32), dtype)
    together = linear(x)
    for row in range(2):
        chex.assert_trees_all_equal(linear(x[row : row + 1])[0], together[row])


@pytest.mark.parametrize(
    ("shape", "inputs", "dtype", "rows"),
    [
        ((1, 1, 4), 1, jnp.bfloat16, 2),
        ((1, 4), 1, jnp.bfloat16, 2),
        ((1, 1, 2, 4), 2, jnp.bfloat16, 2),
        ((1, 3, 4), 1, jnp.bfloat16, 1),
        ((3, 1, 4), 1, jnp.bfloat16, 3),
        ((1, 1, 4), 1, jnp.float32, 1),
    ],
)
def test_only_a_single_narrow_vector_is_multiplied_beside_zeros(shape, inputs, dtype, rows):
    seen = []

    def multiply(x):
        seen.append(x.shape[0])
        return x + 1

    x = jnp.ones(shape, dtype)
    result = product(multiply, x, inputs)
    assert (seen, result.shape) == ([rows], shape)
    chex.assert_trees_all_equal(result, x + 1)
