"""One layer's predictions of its keys' importance, and their importance from attention.

The norms of values after the output projection (`policies/importance.py`) use the Gram matrix of
the rows of W_o that read a head, |v W_o|^2 = v (W_o W_o^T) v^T, which avoids a value of the model's
width for every head.
"""

from typing import Any, no_type_check

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dms_jax.model.rope import apply_rope
from dms_jax.policies.base import Policy
from dms_jax.policies.importance import importance
from dms_jax.policies.values import Decisions, Tokens


@no_type_check  # jax also builds it from shapes
@struct.dataclass
class Supervision:
    """Predictions of every layer and their targets.

    Attributes:
      predicted: the policy's prediction for each key (`Policy.predictions`).
      importance: logarithm of the importance of each key to queries beyond the window; 0 for the
        attention sinks (`FutureAttention.sinks`).
      known: keys with such a later query; without the sinks if importance itself is learned.
    """

    predicted: Float[Array, "*L B K T"]
    importance: Float[Array, "*L B K T"]
    known: Bool[Array, "*L B T"]


def supervise(
    policy: Policy,
    decisions: Decisions,
    tokens: Tokens,
    rotation: tuple[Float[Array, "B T half"], Float[Array, "B T half"]],
    inputs: Float[Array, "B T E"],
    output_kernel: Float[Array, "H D E"],
    *,
    scale: float,
    segment_ids: Int[Array, "B T"] | None,
) -> Supervision:
    """Returns a layer's predictions and the importance of its keys under full attention.

    Args:
      policy: a policy that borrows no neuron; its window and reduction apply.
      decisions: the tokens' decisions.
      tokens: the layer's tokens before rotation.
      rotation: cos and sin of their positions.
      inputs: the input of the layer's attention, after its norm.
      output_kernel: matrix of the output projection, with its low-rank update.
      scale, segment_ids: see `importance`.
    """
    seen_as = policy.retrofit.supervision
    assert seen_as is not None
    q, k = (apply_rope(x, *rotation) for x in (tokens.q, tokens.k))
    wide: Any = jnp.promote_types(inputs.dtype, jnp.float32)
    kernel, values = output_kernel.astype(wide), tokens.v.astype(wide)
    gram = jnp.einsum("HDE,HFE->HDF", kernel, kernel)
    gram = gram.reshape(tokens.k.shape[2], -1, *gram.shape[1:])
    squares = jnp.einsum("BTKD,KGDF,BTKF->BTKG", values, gram, values)
    tiny = jnp.finfo(wide).tiny
    found = importance(
        q,
        k,
        jnp.sqrt(jnp.maximum(squares, tiny)).reshape(q.shape[:3]),
        jnp.linalg.norm(inputs.astype(wide), axis=-1) + tiny,
        seen_as=seen_as,
        scale=scale,
        segment_ids=segment_ids,
    )
    sinks = tokens.positions < seen_as.sinks
    known = found.known
    if seen_as.learns == "importance":
        known = known & ~sinks
    return Supervision(
        predicted=policy.predictions(decisions),
        importance=jnp.where(sinks[:, None], 0, found.log),
        known=known,
    )
