"""The auxiliary loss that drives a model to its compression ratio (DMS; DMC, eq. 10).

With s the share of positive decisions (evict or merge) of a sequence, over all layers and heads,
and the target s* = 1 - 1 / ratio:

    L = max(0, s* - s)

So heads and layers may differ, and a model that compresses more than the target is not penalised.
Decisions are hard with a straight-through gradient.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def evicted_shares(
    decisions: Float[Array, "L B K T"], valid: Bool[Array, "B T"] | None = None
) -> Float[Array, "L B K"]:
    """Returns the share of positive decisions of each head, over the valid tokens."""
    if valid is None:
        return jnp.mean(decisions, axis=-1)
    kept = jnp.where(valid[None, :, None], decisions, 0)
    counts = jnp.maximum(jnp.sum(valid, axis=-1), 1).astype(decisions.dtype)
    return jnp.sum(kept, axis=-1) / counts[:, None]


def compression_loss(
    shares: Float[Array, "L B K"], target: Float[Array, ""] | float
) -> Float[Array, " B"]:
    """Returns the loss of each sequence."""
    return jnp.maximum(target - jnp.mean(shares, axis=(0, 2)), 0)
