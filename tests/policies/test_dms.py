"""DMS's decisions: threshold and sampling, with equal probabilities in training."""

import chex
import jax.numpy as jnp
import numpy as np

from dms_jax.policies import DMS, draws
from tests.support.chunks import chunk_of, tokens_of

DRAWN = DMS(source="adapter", alpha_scale=1.0, alpha_offset=0.0, decisions="bernoulli", seed=5)


def shown(logits, positions, layer=0):
    """Returns the tokens of a layer whose adapter outputs the raw `logits` [B, K, T]."""
    batch, kv_heads, length = logits.shape
    nothing = np.zeros((batch, length, kv_heads, 2))
    adapter_logits = jnp.asarray(logits)
    return tokens_of(nothing, positions=positions, layer=layer, adapter_logits=adapter_logits)


def marks(policy, logits, positions, layer=0):
    return np.asarray(policy.decide(shown(logits, positions, layer)).marks)


def test_draws_have_the_probability_of_the_logit():
    positions = np.arange(4000)[None]
    for logit in (-2.0, 0.0, 1.0):
        logits = np.full((1, 3, 4000), logit, np.float32)
        share = marks(DRAWN, logits, positions).mean(-1)[0]
        chex.assert_trees_all_close(share, 1 / (1 + np.exp(-logit)), rtol=1e-7, atol=0.03)
    saturated = np.where(np.arange(4000) % 3 == 0, 40.0, -40.0).astype(np.float32)[None, None]
    chex.assert_trees_all_equal(marks(DRAWN, saturated, positions), saturated > 0)


def test_training_draws_as_inference_does():
    """Training's noise samples equally: u < sigmoid(a) iff a - logit(u) > 0."""
    random = np.random.default_rng(0)
    logits = random.normal(size=(1, 2, 300)).astype(np.float32)
    positions = np.arange(300)[None]
    tokens = shown(logits, positions)
    decisions = DRAWN.decide(tokens)
    u = draws.token_uniforms(draws.row_hashes(5, jnp.asarray(0), 2), jnp.asarray(positions))
    relaxed = DRAWN.relax(chunk_of(tokens, decisions=decisions), jnp.log1p(-u) - jnp.log(u))
    chex.assert_trees_all_equal(relaxed.decisions, decisions.marks)
    assert 0.3 < relaxed.decisions.mean() < 0.7


def test_one_draw_for_the_layer():
    policy = DMS(source="adapter", per="layer", alpha_offset=0.0, decisions="bernoulli")
    drawn = marks(policy, np.zeros((2, 3, 50), np.float32), np.arange(50)[None].repeat(2, 0))
    assert 0 < drawn.mean() < 1
    chex.assert_trees_all_equal(drawn, drawn[:, :1].repeat(3, 1))
