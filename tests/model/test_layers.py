"""Products of few vectors."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dms_jax.model.layers import Linear, contract


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_single_narrow_vector_multiplies_as_in_a_batch(dtype):
    inputs, outputs = {"heads": 3, "head_dim": 32}, {"embed": 200}
    linear = Linear(inputs, outputs, bias=True, dtype=dtype, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (2, 1, 3, 32), dtype)
    together = linear(x)
    for row in range(2):
        chex.assert_trees_all_equal(linear(x[row : row + 1])[0], together[row])


@pytest.mark.parametrize(
    ("vectors", "length", "width", "dtype", "halves"),
    [
        (0, 512, 128, jnp.bfloat16, True),
        (1, 512, 128, jnp.bfloat16, True),
        (64, 512, 128, jnp.float16, True),
        (65, 512, 128, jnp.bfloat16, False),
        (2, 511, 127, jnp.bfloat16, False),
        (2, 508, 128, jnp.bfloat16, False),
        (2, 512, 128, jnp.float32, False),
    ],
)
def test_long_narrow_matrices_are_summed_in_halves(vectors, length, width, dtype, halves):
    x = jax.random.normal(jax.random.key(0), (vectors, 1, length), dtype)
    kernel = jax.random.normal(jax.random.key(1), (length, width), dtype)
    exact = np.asarray(x, np.float64) @ np.asarray(kernel, np.float64)
    result = contract(x, kernel, 1)
    assert result.dtype == dtype
    # Sums are in float32, and rounded once.
    rounded, summed = (float(jnp.finfo(each).eps) for each in (dtype, jnp.float32))
    chex.assert_trees_all_close(
        np.asarray(result, np.float64), exact, rtol=rounded, atol=2 * length * summed
    )
    lowered = jax.jit(contract, static_argnums=2).lower(x, kernel, 1).as_text()
    assert ("batching_dims" in lowered) == halves
