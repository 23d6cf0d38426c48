"""The weights that slots receive, against NumPy, and the memory they take on a GPU."""

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.received.reference import received_weights
from tests.policies.received_weights import SLOTS
from tests.support.for_gpus import told_by


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_slots_receive_what_queries_give(dtype):
    """Three groups of two queries, of which the first sees nothing."""
    random = np.random.default_rng(0)
    queries = jnp.asarray(random.normal(size=(2, 2, 3, 2, 4)), dtype)
    keys = jnp.asarray(random.normal(size=(2, 2, 9, 4)), dtype)
    visible = random.random((2, 2, 3, 9)) < 0.6
    visible[:, :, 0] = False
    found = received_weights(queries, keys, jnp.asarray(visible), 0.5)
    scores = 0.5 * np.einsum(
        "bkwgd,bksd->bkwgs", np.asarray(queries, np.float64), np.asarray(keys, np.float64)
    )
    weights = np.where(visible[:, :, :, None], np.exp(scores), 0)
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-300)
    assert found.dtype == jnp.float32
    chex.assert_trees_all_close(found, weights.sum(2).mean(2).astype(np.float32), rtol=1e-5)


def test_on_a_gpu_the_slots_of_a_query_are_side_by_side():
    """Otherwise three kernels make weights of scores and add them up, one across memory."""
    arrays = told_by("tests/policies/received_weights.py")
    assert arrays
    assert {shape[-1] for shape in arrays} == {SLOTS}
