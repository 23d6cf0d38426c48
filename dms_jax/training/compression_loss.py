"""The auxiliary loss that drives a model to its compression ratio.

With s_lh the share of positive decisions (evict or merge) of layer l and head h in a sequence, s_l
and s its means over the layer and over the model, and the target s* = 1 - 1 / ratio:

    global      L = max(0, s* - s)                                        (DMS; DMC, eq. 10)
    per layer   the same for each s_l, then the mean      (DMC's local prior, appendix E)
    spread      mean over l, h of |s_lh - stop_gradient(s_l)|                     (DMC-C)

The global form lets heads and layers differ. Neither penalises a model that compresses more than
the target. Decisions are hard with a straight-through gradient. DMC-C's paper says only that a loss
keeps the ratios of a layer's heads similar; the spread is our choice.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

Prior = Literal["global", "layer"]


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
    shares: Float[Array, "L B K"],
    target: Float[Array, ""] | float,
    *,
    prior: Prior = "global",
) -> Float[Array, " B"]:
    """Returns the loss of each sequence, over all layers together or per layer."""
    share = jnp.mean(shares, axis=-1)  # [L, B]
    if prior == "global":
        share = jnp.mean(share, axis=0, keepdims=True)
    return jnp.mean(jnp.maximum(target - share, 0), axis=0)


def head_spread(shares: Float[Array, "L B K"]) -> Float[Array, " B"]:
    """Returns the mean absolute deviation of the heads of a layer from the layer's mean."""
    middle = jax.lax.stop_gradient(jnp.mean(shares, axis=-1, keepdims=True))
    return jnp.mean(jnp.abs(shares - middle), axis=(0, 2))
