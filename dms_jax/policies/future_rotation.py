"""The mean rotation of the next positions, for policies that score keys for future queries."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dms_jax.policies.values import Chunk
from pallas_kernels.rotation import rotate_halves


def last_rotation(
    chunk: Chunk, dtype: jnp.dtype
) -> tuple[Float[Array, "B 1 half"], Float[Array, "B 1 half"]]:
    """Returns cos and sin of the position of the chunk's last token, the same for every head."""
    last = jnp.maximum(chunk.count - 1, 0)[:, None, None]
    cos, sin = (jnp.take_along_axis(x, last, axis=1).astype(dtype) for x in chunk.rotation)
    return cos, sin


def mean_rotation(
    chunk: Chunk, distances: Int[np.ndarray, " n"], dtype: jnp.dtype
) -> tuple[Float[Array, "B 1 half"], Float[Array, "B 1 half"]]:
    """Returns the mean cos and sin of the positions at some distances after the last token.

    The mean over j of exp(i f (t + j)) is exp(i f t) times that of exp(i f j).
    """
    angles = distances[:, None] * np.asarray(chunk.static.frequencies)
    mean_cos, mean_sin = (jnp.asarray(f(angles).mean(0), dtype) for f in (np.cos, np.sin))
    return rotate_halves(*last_rotation(chunk, dtype), mean_cos, mean_sin)


def turn(x: Float[Array, "... D"], cos: Array, sin: Array) -> Float[Array, "... D"]:
    """Rotates the last axis in the planes of dims i and i + D/2."""
    low, high = jnp.split(x, 2, axis=-1)
    return jnp.concatenate(rotate_halves(low, high, cos, sin), axis=-1)
