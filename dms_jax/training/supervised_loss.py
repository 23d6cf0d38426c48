"""The loss of a stage "supervise": the policy predicts how much attention each token gets.

    importance        L = mean over known keys of (predicted_j - log s_j)^2        (KVzap, KVpop)
    least_important   L = mean over known keys of the binary cross-entropy of the eviction logit
                      with 1[s_j is among the share s* of the least important ones]       (DMS)

log s_j is the importance of `policies/importance.py`, from full attention without eviction. The
least important keys are ranked over all layers and heads of a sequence, and s* is the final share
of the recipe, so heads and layers differ from the start, as attention does.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dms_jax.model.supervision import Supervision
from dms_jax.policies.values import FutureAttention


def supervised_loss(
    learned: FutureAttention, seen: Supervision, share: Float[Array, ""] | float
) -> Float[Array, " B"]:
    """Returns the loss of each sequence; 0 for one without known keys.

    Args:
      learned: the policy's training target (`Retrofit.supervision`).
      seen: predictions and importance of every layer, [L, B, K, T].
      share: s*, share of the keys that count as the least important.
    """
    known = jnp.broadcast_to(seen.known[:, :, None], seen.predicted.shape)
    if learned.learns == "importance":
        errors = jnp.square(seen.predicted - seen.importance)
    else:
        errors = jax.nn.softplus(seen.predicted) - seen.predicted * _mark_least(seen, known, share)
    count = jnp.maximum(known.sum((0, 2, 3)), 1).astype(errors.dtype)
    return jnp.sum(jnp.where(known, errors, 0), axis=(0, 2, 3)) / count


def _mark_least(seen: Supervision, known: Array, share: Array | float) -> Float[Array, "L B K T"]:
    """Marks the least important share of each sequence's known keys."""
    batch = known.shape[1]
    values = jnp.where(known, seen.importance, jnp.inf)
    ascending = jnp.sort(jnp.moveaxis(values, 1, 0).reshape(batch, -1), axis=-1)
    index = (known.sum((0, 2, 3)) * share).astype(jnp.int32)
    bound = jnp.take_along_axis(ascending, index[:, None], axis=-1)[:, 0]
    return (values < bound[:, None, None]).astype(values.dtype)
