"""Rotary position embedding (RoPE), and its context-extending scalings.

A head of D dims is D/2 planes: plane i holds dims i and i + D/2 (Hugging Face's half-split form)
and is rotated by the angle position * f_i. Unscaled, f_i = theta^(-2i/D) (RoFormer,
arXiv 2104.09864, eq. 15).

- linear: f_i / factor (arXiv 2306.15595).
- llama3: f_i / factor for wavelengths 2 pi / f_i above original / low_freq_factor, f_i for those
  below original / high_freq_factor, and an interpolation of the two in between.
- yarn: f_i is interpolated by the number of turns that the plane makes over the original context
  (arXiv 2309.00071, eq. 18 to 23), and cos and sin are multiplied by 0.1 ln(factor) + 1 unless the
  config gives another factor.

Shapes: B sequences, T tokens, D head dim.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float64, Int

from dms_jax.config import Rope
from pallas_kernels.rotation import rotate_halves


def rope_frequencies(
    rope: Rope | None, head_dim: int
) -> tuple[Float64[np.ndarray, " half"], float]:
    """Returns the frequency of each rotary plane, and the attention factor.

    Frequencies [D/2] are float64 in radians per token; the attention factor multiplies cos and sin.
    Without positions no plane turns.
    """
    if rope is None:
        return np.zeros(head_dim // 2), 1.0
    frequencies = rope.theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.kind == "linear":
        return frequencies / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(frequencies, rope), 1.0
    if rope.kind == "yarn":
        return _yarn(frequencies, rope, head_dim), _yarn_attention_factor(rope)
    return frequencies, 1.0


def rope_tables(
    rope: Rope | None,
    head_dim: int,
    positions: Int[Array, "..."],
    *,
    dtype: DTypeLike = jnp.float32,
) -> tuple[Float[Array, "... half"], Float[Array, "... half"]]:
    """Returns cos and sin [..., D/2] of every position, in `dtype` but at least float32.

    Angles in float32 have an error of about position * 2^-24 radians; pass float64 (with jax's x64
    mode) if that matters.
    """
    frequencies, attention_factor = rope_frequencies(rope, head_dim)
    dtype = jnp.promote_types(dtype, jnp.float32)
    angles = positions.astype(dtype)[..., None] * jnp.asarray(frequencies, dtype)
    return jnp.cos(angles) * attention_factor, jnp.sin(angles) * attention_factor


def mean_rotation(rope: Rope | None, head_dim: int, length: int) -> Float64[np.ndarray, "2 half"]:
    """Returns the mean cos and the mean sin of the first `length` positions."""
    frequencies, attention_factor = rope_frequencies(rope, head_dim)
    angles = np.arange(length)[:, None] * frequencies
    return np.stack([np.cos(angles).mean(0), np.sin(angles).mean(0)]) * attention_factor


def apply_rope(
    x: Float[Array, "*batch T heads D"],
    cos: Float[Array, "*batch T half"],
    sin: Float[Array, "*batch T half"],
) -> Float[Array, "*batch T heads D"]:
    """Rotates every head of `x` by its token's angles, in at least float32.

    # In: D = 4, x = [1, 0, 0, 0], angles [a, b]  # Out: [cos a, 0, sin a, 0]
    """
    with jax.named_scope("rope"):
        dtype = jnp.promote_types(x.dtype, jnp.float32)
        first, second = jnp.split(x.astype(dtype), 2, axis=-1)
        cos, sin = cos[..., None, :].astype(dtype), sin[..., None, :].astype(dtype)
        turned = rotate_halves(first, second, cos, sin)
        return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def _llama3(frequencies: np.ndarray, rope: Rope) -> np.ndarray:
    original, low, high = (
        rope.original_max_position_embeddings,
        rope.low_freq_factor,
        rope.high_freq_factor,
    )
    assert original is not None  # checked by Rope
    assert low is not None
    assert high is not None
    turns = original * frequencies / (2 * math.pi)
    # 0 if a plane makes fewer turns than low_freq_factor over the original context, 1 if it
    # makes more than high_freq_factor.
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 - keep) * frequencies / rope.factor + keep * frequencies


def _yarn(frequencies: np.ndarray, rope: Rope, head_dim: int) -> np.ndarray:
    original = rope.original_max_position_embeddings
    assert original is not None  # checked by Rope

    def plane_making(turns: float | int) -> float:
        wavelength = original / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = plane_making(rope.beta_fast), plane_making(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a ramp of zero width would divide by zero
    interpolated = np.clip((np.arange(head_dim // 2) - low) / (high - low), 0.0, 1.0)
    return interpolated * frequencies / rope.factor + (1 - interpolated) * frequencies


def _yarn_attention_factor(rope: Rope) -> float:
    def magnitude(scale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * scale * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return magnitude(1.0)


def segment_positions(
    tokens: Int[Array, "B T"], segment_ids: Int[Array, "B T"] | None
) -> Int[Array, "B T"]:
    """Returns the position of each token within its document.

    # segment_ids  In: [1, 1, 1, 2, 2]  Out: [0, 1, 2, 0, 1]
    """
    index = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    if segment_ids is None:
        return index
    starts = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
    return index - jax.lax.cummax(jnp.where(starts, index, 0), axis=1)
