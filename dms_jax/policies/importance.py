"""The target of learned evictions: how important a token is to later queries.

    c_hij = a_hij * ||W_o^h v_j|| / ||x_i||     what key j adds to query i's residual stream
    s_j   = max over i > j + window, h in the group, of c_hij              "max", KVzip+ and KVzap
    s_j   = mean over i > j + window, h in the group, of c_hij                             "mean"

with a the attention weights of query head h over the whole past, x the input of the layer's
attention after its norm, and W_o^h the rows of the output projection that read head h (KVzap, arXiv
2601.07891, section 3). Queries within the window see the key in any case, so only later ones count;
a key without later queries has no importance (`known`). KVzip uses the queries of a repetition of
the text; here they are the text's own, as in training DMS.

A scorer predicts the logarithm. Weights below exp(-16) are raised to it. The first tokens of a
document are exempt (`FutureAttention.sinks`): their weights are large and their values small, so
their contribution is small, but without them all other weights grow.
"""

from typing import no_type_check

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dms_jax.policies.values import FutureAttention

# A scorer predicts SCALE * output + LEVEL, so that small weights reach the level of the scores.
SCALE, LEVEL = 10.0, -6.0
LEAST = -16.0
SINKS = 4  # first tokens exempt from importance
BLOCK = 128  # queries whose weights are in memory at a time


@no_type_check  # jax also builds it from shapes
@struct.dataclass
class Importance:
    """The logarithm of the importance of each key, and which keys have one."""

    log: Float[Array, "B K T"]
    known: Bool[Array, "B T"]


def predicted(output: Float[Array, "B K T"], level: float = LEVEL) -> Float[Array, "B K T"]:
    """Returns a scorer's prediction of the logarithm of the importance, in at least float32.

    # In: [0.0, 0.2]  Out: [-6.0, -4.0]
    """
    return SCALE * output.astype(jnp.promote_types(output.dtype, jnp.float32)) + level


def importance(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B T K D"],
    value_norms: Float[Array, "B T H"],
    input_norms: Float[Array, "B T"],
    *,
    seen_as: FutureAttention,
    scale: float,
    segment_ids: Int[Array, "B T"] | None = None,
) -> Importance:
    """Returns the importance of each key to the queries beyond the window, without a gradient.

    Args:
      q, k: rotated queries and keys.
      value_norms: norm of each value after the output projection, for each query head.
      input_norms: norm of the layer's input at each token.
      seen_as: the window within which queries do not count, and the reduction over the other
        queries and over the query heads of a group.
      scale: factor on the dot products.
      segment_ids: ids of the documents packed into each sequence.
    """
    q, k, value_norms, input_norms = jax.lax.stop_gradient((q, k, value_norms, input_norms))
    batch, length, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[2]
    wide = jnp.promote_types(q.dtype, jnp.float32)
    size = min(BLOCK, length)
    pad = -length % size
    if segment_ids is None:
        segment_ids = jnp.zeros((batch, length), jnp.int32)
    keys = jnp.arange(length)
    grouped = q.reshape(batch, length, num_kv_heads, num_heads // num_kv_heads, head_dim)

    def blocks(x: Array, fill: int = 0) -> Array:
        """[B, T, ...] to [blocks, B, size, ...]."""
        width = ((0, 0), (0, pad), *((0, 0),) * (x.ndim - 2))
        x = jnp.pad(x, width, constant_values=fill).reshape(batch, -1, size, *x.shape[2:])
        return jnp.moveaxis(x, 1, 0)

    def add(total, xs):
        queries, norms, ids, at = xs
        scores = scale * jnp.einsum("BTKGD,BSKD->BKGTS", queries, k, preferred_element_type=wide)
        seen = (ids[..., None] == segment_ids[:, None]) & (at[:, None] >= keys)  # [B, T, S]
        scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
        # The padding queries of the last block see nothing.
        normaliser = jnp.maximum(jax.nn.logsumexp(scores, axis=-1, keepdims=True), -1e30)
        logs = scores - normaliser - jnp.log(norms.astype(wide))[:, None, None, :, None]
        later = seen & (at[:, None] - keys > seen_as.window)
        logs = jnp.where(later[:, None, None], logs, -jnp.inf)
        count = total[1] + later.sum(1, dtype=jnp.int32)
        if seen_as.reduction == "max":
            return (jnp.maximum(total[0], logs.max(3)), count), None
        return (total[0] + jnp.exp(logs).sum(3), count), None

    start = jnp.full((batch, num_kv_heads, num_heads // num_kv_heads, length), -jnp.inf, wide)
    start = start if seen_as.reduction == "max" else jnp.zeros_like(start)
    xs = (
        blocks(grouped),
        blocks(input_norms, 1),
        blocks(segment_ids, -1),
        jnp.arange(length + pad).reshape(-1, size),
    )
    (total, count), _ = jax.lax.scan(add, (start, jnp.zeros((batch, length), jnp.int32)), xs)
    norms = jnp.moveaxis(value_norms.reshape(batch, length, num_kv_heads, -1), 1, 3)
    if seen_as.reduction == "max":
        log = (total + jnp.log(norms.astype(wide))).max(2)
    else:
        mean = (total * norms.astype(wide)).mean(2) / jnp.maximum(count, 1)[:, None]
        log = jnp.log(mean)
    return Importance(log=jnp.maximum(log, LEAST), known=count > 0)
