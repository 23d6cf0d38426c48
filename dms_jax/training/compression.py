"""What pulls a model to its compression ratio: the share of decisions to evict or to merge.

With s_lh the share of yes among the decisions of layer l and head h in a sequence, s_l and s their
means, and the target s* = 1 - 1 / ratio:

    one-sided   L = max(0, s* - s)                                        (DMS; DMC, eq. 10)
    kl          L = KL(Bernoulli(s) || Bernoulli(s*))           (two-sided; a review of DMS)
    per layer   the same for each s_l, then the mean      (DMC's local prior, appendix E)
    spread      mean over l, h of |s_lh - stop_gradient(s_l)|                     (DMC-C)

The one-sided global form leaves heads and layers free to differ, and a model that compresses more
than the target alone. Decisions are hard with a straight-through gradient.

Ours, where the papers give no formula: the spread of DMC-C, whose paper says only that a loss keeps
the ratios of a layer's heads similar; and in the divergence both shares are smoothed, p becoming
0.001 + 0.998 p, since a model starts at a share of exactly 0 and a target of exactly 0.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

Regulariser = Literal["one_sided", "kl"]
Prior = Literal["global", "layer"]

_SMOOTHING = 1e-3


def evicted_shares(
    decisions: Float[Array, "L B K T"], valid: Bool[Array, "B T"] | None = None
) -> Float[Array, "L B K"]:
    """Share of yes among the decisions of each head, over the tokens that are valid."""
    if valid is None:
        return jnp.mean(decisions, axis=-1)
    kept = jnp.where(valid[None, :, None], decisions, 0)
    counts = jnp.maximum(jnp.sum(valid, axis=-1), 1).astype(decisions.dtype)
    return jnp.sum(kept, axis=-1) / counts[:, None]


def compression_loss(
    shares: Float[Array, "L B K"],
    target: Float[Array, ""] | float,
    *,
    regulariser: Regulariser = "one_sided",
    prior: Prior = "global",
) -> Float[Array, " B"]:
    """How far each sequence is from the target, over all layers together or layer by layer."""
    share = jnp.mean(shares, axis=-1)  # [L, B]
    if prior == "global":
        share = jnp.mean(share, axis=0, keepdims=True)
    distance = _divergence if regulariser == "kl" else _shortfall
    return jnp.mean(distance(share, target), axis=0)


def head_spread(shares: Float[Array, "L B K"]) -> Float[Array, " B"]:
    """How far the heads of a layer are from the layer's mean."""
    middle = jax.lax.stop_gradient(jnp.mean(shares, axis=-1, keepdims=True))
    return jnp.mean(jnp.abs(shares - middle), axis=(0, 2))


def _shortfall(share: Array, target: Array | float) -> Array:
    return jnp.maximum(target - share, 0)


def _divergence(share: Array, target: Array | float) -> Array:
    p, q = (_SMOOTHING + (1 - 2 * _SMOOTHING) * jnp.asarray(x) for x in (share, target))
    return p * (jnp.log(p) - jnp.log(q)) + (1 - p) * (jnp.log1p(-p) - jnp.log1p(-q))
