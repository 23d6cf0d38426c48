"""A ring of the most recent queries of every head, for policies in which they vote."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dms_jax.policies.values import CacheShape, Chunk

Ring = Float[Array, "B K W G D"]


def empty_ring(shape: CacheShape, window: int) -> Ring:
    """Returns an empty ring of rotated queries; position t is stored at t mod window."""
    size = (*shape.rows, window, shape.group, shape.head_dim)
    return jnp.zeros(size, shape.dtype)


def remember(ring: Ring, chunk: Chunk, q: Float[Array, "B T H D"]) -> Ring:
    """Writes the last rotated queries of a chunk into the ring."""
    batch, num_kv_heads, window, group, head_dim = ring.shape
    size = min(q.shape[1], window)
    index = chunk.count[:, None] - size + jnp.arange(size)
    place = jnp.where(index >= 0, (chunk.first[:, None] + index) % window, window)
    last = jnp.take_along_axis(q, jnp.maximum(index, 0)[..., None, None], axis=1)
    grouped = last.reshape(batch, -1, num_kv_heads, group, head_dim).astype(ring.dtype)
    # Entries before the chunk are dropped. The barrier is the one of `pool.store`.
    place, grouped = jax.lax.optimization_barrier((place, grouped))
    at = ring.at[jnp.arange(batch)[:, None], :, place]
    return at.set(grouped, mode="drop", unique_indices=True)
