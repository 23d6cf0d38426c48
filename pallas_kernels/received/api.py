"""`received_attention`: the attention weight that each slot receives from a chunk's queries.

    sums[b, k, s] = sum over queries i of  mean over the group's heads of softmax(scale q_i K)_s

over the slots that query i sees, as H2O (Zhang et al., arXiv 2306.14048) accumulates it. The T x S
weights of a head are never in memory.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Implementation, Operation, deferred
from pallas_kernels.received.reference import received_attention_xla

OPERATION = Operation(
    "received_attention",
    (
        deferred("mosaic_gpu", "cuda", "pallas_kernels.received.gpu", "received_attention_mosaic"),
        Implementation("xla", None, received_attention_xla),
    ),
)


def received_attention(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B K S D"],
    positions: Int[Array, "B T"],
    since: Int[Array, "B K S"],
    *,
    scale: float,
    implementation: str | None = None,
) -> Float[Array, "B K S"]:
    """Sums the attention weights that slots receive from all queries of a chunk.

    Query i of sequence b sees slot s of row (b, k) iff `since[b, k, s] <= positions[b, i]`.

    Args:
      q: rotated queries. Head h reads KV head h // (H / K).
      k: rotated keys of every row by slot, in any order.
      positions: the position of each query, less than NEVER; -1 for padding, which contributes
        nothing.
      since: the first position that sees each slot (its token's), 0 or more; NEVER for an unused
        slot, whose key may be anything.
      scale: factor on the dot products; static.
      implementation: "mosaic_gpu" (Hopper) serves bfloat16, "xla" everything, and TPUs; None
        chooses the best one for the platform of the lowering.

    Returns:
      The sums over queries of the weights' means over the group, in float32, or in float64 for
      float64 queries. Products are in q's and k's dtype, accumulated in at least float32.

    Raises:
      ValueError: arguments disagree.
      NotImplementedError: the implementation cannot serve the call, with the reason.
    """
    if q.ndim != 4 or k.ndim != 4 or k.shape[::3] != q.shape[::3]:
        raise ValueError(
            f"received_attention: q, k must be [B, T, H, D], [B, K, S, D], got {q.shape}, {k.shape}"
        )
    if k.shape[1] == 0 or q.shape[2] % k.shape[1]:
        raise ValueError(
            f"received_attention: {q.shape[2]} query heads cannot share {k.shape[1]} KV heads"
        )
    if positions.shape != q.shape[:2] or since.shape != k.shape[:3]:
        raise ValueError(
            f"received_attention: positions must be [B, T] and since [B, K, S] beside {q.shape}, "
            f"{k.shape}; got {positions.shape}, {since.shape}"
        )
    for name, array in (("positions", positions), ("since", since)):
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise ValueError(
                f"received_attention: {name} must hold integers, has dtype {array.dtype}"
            )
    if q.size == 0 or k.size == 0:
        return jnp.zeros(since.shape, jnp.promote_types(q.dtype, jnp.float32))
    positions, since = positions.astype(jnp.int32), since.astype(jnp.int32)
    return OPERATION(implementation, q, k, positions, since, scale=float(scale))
