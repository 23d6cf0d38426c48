"""Rotary embeddings: transformers' frequencies, rotation by complex numbers, relative scores."""

import chex
import jax
import jax.numpy as jnp
import numpy as np

from dms_jax.config import Rope
from dms_jax.model.rope import apply_rope, rope_tables


def test_rotation_equals_complex_multiplication():
    rope = Rope(theta=100.0)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 5, 3, 6)).astype(np.float32)
    positions = rng.integers(0, 40, (2, 5))
    cos, sin = rope_tables(rope, 6, jnp.asarray(positions))
    turned = np.asarray(apply_rope(jnp.asarray(x), cos, sin))
    angle = positions[..., None] * 100.0 ** (-np.arange(3) / 3)
    expected = (x[..., :3] + 1j * x[..., 3:]) * np.exp(1j * angle)[:, :, None]
    chex.assert_trees_all_close(
        turned[..., :3] + 1j * turned[..., 3:], expected, rtol=1e-7, atol=1e-5
    )


def test_rotation_keeps_dtype():
    rope = Rope(theta=50.0)
    cos, sin = rope_tables(rope, 8, jnp.arange(30)[None], dtype=jnp.bfloat16)
    chex.assert_type([cos, sin], jnp.float32)
    x = jax.random.normal(jax.random.key(0), (1, 30, 2, 8)).astype(jnp.bfloat16)
    turned = apply_rope(x, cos, sin)
    chex.assert_type(turned, jnp.bfloat16)
    chex.assert_tree_all_finite(turned)
    exact = apply_rope(x.astype(jnp.float32), cos, sin)
    chex.assert_trees_all_equal(turned, exact.astype(jnp.bfloat16))


def test_float64_tables():
    rope = Rope()
    with jax.enable_x64(True):
        cos, _ = rope_tables(rope, 8, jnp.array([100_000]), dtype=jnp.float64)
        chex.assert_type(cos, jnp.float64)
        expected = np.cos(100_000 * 1e4 ** (-np.arange(4) / 4))
        chex.assert_trees_all_close(cos[0], expected, rtol=1e-7, atol=1e-10)


def test_attention_factor_scales_both_tables():
    plain = Rope()
    scaled = Rope(
        kind="yarn",
        factor=1.0,  # nothing is interpolated, so only the given factor shows
        original_max_position_embeddings=16,
        attention_factor=1.5,
    )
    for one, other in zip(
        rope_tables(plain, 8, jnp.arange(4)), rope_tables(scaled, 8, jnp.arange(4)), strict=True
    ):
        chex.assert_trees_all_close(1.5 * one, other, rtol=1e-6)


def test_no_positions_mean_no_rotation():
    cos, sin = rope_tables(None, 8, jnp.arange(5)[None])
    x = jax.random.normal(jax.random.key(0), (1, 5, 2, 8))
    chex.assert_trees_all_equal(apply_rope(x, cos, sin), x)
