"""The programs of a draw have no sort."""

import jax
import jax.numpy as jnp

from dms_jax.generation.sampling import Sampling, sample


def test_sampling_sorts_nothing():
    """Sorting a vocabulary of 152K took more than half of a small model's step on a GPU."""
    rule = Sampling(temperature=0.7, top_k=50, top_p=0.9, min_p=0.01).filter
    arguments = (jnp.zeros((2, 300)), jax.random.split(jax.random.key(0), 2), jnp.zeros(2, int))
    text = str(jax.make_jaxpr(lambda *given: sample(*given, rule))(*arguments))
    assert "argmax" in text
    assert "sort[" not in text
    assert "top_k[" not in text
