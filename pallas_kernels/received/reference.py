"""The attention weight that slots receive, in plain XLA: block after block of queries."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# The `since` of a slot that no query sees.
NEVER = 2**31 - 1
# Weights of a block of queries, over all sequences and heads: 256 MB in float32, or more with the
# minimum number of queries (every block reads all keys).
MOST_WEIGHTS = 2**26
FEWEST = 16


def received_weights(
    queries: Float[Array, "B K W G D"],
    keys: Float[Array, "B K S D"],
    visible: Bool[Array, "B K W S"],
    scale: float,
) -> Float[Array, "B K S"]:
    """Returns the weight that each slot receives: summed over queries, averaged over the group.

    A query that sees no slot contributes nothing. Slots are the last axis of all arrays here, so
    that a GPU normalises the weights of a query in one kernel and sums columns in another; 16-bit
    products are accumulated in 32 bits.

    Args:
      queries: W queries of each query head, after rotation.
      keys: the keys of each row.
      visible: the slots that a query attends to.
      scale: factor of the scores.
    """
    wide = jnp.promote_types(queries.dtype, jnp.float32)
    scores = jnp.einsum("BKWGD,BKSD->BKWGS", queries, keys, preferred_element_type=wide)
    visible = visible[:, :, :, None]
    weights = jax.nn.softmax(jnp.where(visible, scale * scores, -1e30), axis=-1)
    return jnp.where(visible, weights, 0).sum((2, 3)) / queries.shape[3]


def received_attention_xla(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B K S D"],
    positions: Int[Array, "B T"],
    since: Int[Array, "B K S"],
    *,
    scale: float,
) -> Float[Array, "B K S"]:
    """Computes `received_attention` in XLA, in memory linear in T and in S."""
    batch, num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, num_slots = k.shape[1:3]
    a_query = batch * num_heads * num_slots
    most = 1 << max(0, (MOST_WEIGHTS // a_query).bit_length() - 1)
    size = min(num_tokens, max(FEWEST, most))
    padding = -num_tokens % size
    positions = jnp.pad(positions, ((0, 0), (0, padding)), constant_values=-1)
    grouped = jnp.pad(q, ((0, 0), (0, padding), (0, 0), (0, 0)))
    grouped = grouped.reshape(batch, -1, num_kv_heads, num_heads // num_kv_heads, head_dim)
    grouped = jnp.moveaxis(grouped, 2, 1)

    def add_block(sums, start):
        block = jax.lax.dynamic_slice_in_dim(grouped, start, size, axis=2)
        now = jax.lax.dynamic_slice_in_dim(positions, start, size, axis=1)
        visible = since[:, :, None] <= now[:, None, :, None]
        return sums + received_weights(block, k, visible, scale), None

    starts = jnp.arange(0, grouped.shape[2], size)
    zeros = jnp.zeros(since.shape, jnp.promote_types(q.dtype, jnp.float32))
    sums, _ = jax.lax.scan(add_block, zeros, starts)
    return sums
