"""Attention weights of queries over the rows of a cache, for policies that rank tokens by them."""

import jax.numpy as jnp
from jaxtyping import Array, Float

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
