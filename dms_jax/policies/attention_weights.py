"""Attention weights of queries over the rows of a cache, for policies that rank tokens by them."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from dms_jax.policies.values import Rows


def query_weights(q: Float[Array, "B H D"], rows: Rows, scale: float) -> Float[Array, "B K G S"]:
    """Returns the attention weights of one query per sequence over its rows."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    batch, num_kv_heads = rows.k.shape[:2]
    grouped = q.reshape(batch, num_kv_heads, -1, q.shape[-1]).astype(wide)
    scores = scale * jnp.einsum("BKGD,BKSD->BKGS", grouped, rows.k.astype(wide))
    live = rows.live[:, :, None]
    scores = jnp.where(live, scores, -jnp.inf)
    weights = jnp.exp(scores - jnp.maximum(scores.max(-1, keepdims=True), -1e30))
    return weights / jnp.maximum(weights.sum(-1, keepdims=True), jnp.finfo(wide).tiny)


def received_weights(
    queries: Float[Array, "B K W G D"],
    keys: Float[Array, "B K S D"],
    visible: Bool[Array, "B K W S"],
    scale: float,
) -> Float[Array, "B K S"]:
    """Returns the weight that each slot receives: summed over queries, averaged over the group.

    A query that sees no slot gives nothing. Slots are the last axis of every array that is made
    here, so that a GPU normalises the weights of a query in one kernel and adds up columns in
    another; products of 16 bits are added up in 32.

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
