"""Training attention with a windowed key bias, in plain XLA.

Sources: DMS (Łańcucki et al. 2025), the training mask of section 3.1. With G = H / K, head h of KV
head k = h // G, and visibility V(i) = {j <= i : segment[j] = segment[i]},

    s[i, j] = scale * <q_i, k_j> + (bias[k, j] if i - j > window else 0)
    o_i     = sum_{j in V(i)} softmax_j(s[i, j]) v_j

Queries are processed in blocks, each against the keys that it can see at all: the sequence is cut
into at most `SPANS` spans, a span of queries reads the keys up to the span's end, and its blocks
of `BLOCK` queries run one after the other, recomputed in the backward pass. Peak memory is
linear in T, and about half of the T x T products are never formed.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

BLOCK = 128
SPANS = 8
# Stands for -inf: exp of it is exactly 0 in every float type used here, and sums of it stay finite.
HIDDEN = -1e30


def _block(
    q: Float[Array, "B N K G D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K D"],
    bias: Float[Array, "B K S"],
    query_segments: Int[Array, "B N"] | None,
    key_segments: Int[Array, "B S"] | None,
    start: int | Int[Array, ""],
    *,
    window: int,
    scale: float,
) -> Float[Array, "B N K G D"]:
    """Attention of the queries [start, start + N) over the keys [0, S)."""
    compute = jnp.promote_types(q.dtype, jnp.float32)
    scores = scale * jnp.einsum(
        "bnkgd,bskd->bkgns",
        q,
        k,
        preferred_element_type=compute,
        precision=jax.lax.Precision.HIGHEST,
    )
    distance = (start + jnp.arange(q.shape[1]))[:, None] - jnp.arange(k.shape[1])[None, :]
    scores = scores + jnp.where(distance > window, bias[:, :, None, None, :], 0)
    visible = distance >= 0
    if query_segments is not None and key_segments is not None:
        same = query_segments[:, :, None] == key_segments[:, None, :]
        visible = (visible & same)[:, None, None]
    scores = jnp.where(visible, scores, HIDDEN)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum(
        "bkgns,bskd->bnkgd",
        weights,
        v,
        preferred_element_type=compute,
        precision=jax.lax.Precision.HIGHEST,
    ).astype(q.dtype)


def retrofit_attention_reference(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K D"],
    bias: Float[Array, "B K T"],
    *,
    window: int,
    scale: float,
    segment_ids: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T H D"]:
    """Serve as the XLA form of `retrofit_attention`; same arguments, differentiable by JAX itself."""
    batch, length, heads, dim = q.shape
    groups = heads // k.shape[2]
    q = q.reshape(batch, length, k.shape[2], groups, dim)
    compute = jnp.promote_types(q.dtype, jnp.float32)
    bias = jnp.maximum(bias.astype(compute), HIDDEN)

    span = BLOCK * -(-length // (BLOCK * SPANS))
    outputs = []
    for first in range(0, length, span):
        last = min(first + span, length)
        keys, values, key_bias = k[:, :last], v[:, :last], bias[:, :, :last]
        key_segments = None if segment_ids is None else segment_ids[:, :last]

        @jax.checkpoint
        def block(start, q_block, segments, keys, values, key_bias, key_segments=key_segments):
            return _block(
                q_block,
                keys,
                values,
                key_bias,
                segments,
                key_segments,
                start,
                window=window,
                scale=scale,
            )

        # In: 1024 queries of a span.  Out: 8 blocks of 128, then the blocks that remain.
        whole = (last - first) // BLOCK if last - first > BLOCK else 0
        middle = first + whole * BLOCK
        if whole:

            def step(index, first=first, block=block, arrays=(keys, values, key_bias)):
                start = first + index * BLOCK
                q_block = jax.lax.dynamic_slice_in_dim(q, start, BLOCK, axis=1)
                segments = None
                if segment_ids is not None:
                    segments = jax.lax.dynamic_slice_in_dim(segment_ids, start, BLOCK, axis=1)
                return block(start, q_block, segments, *arrays)

            blocks = jax.lax.map(step, jnp.arange(whole))
            outputs.append(
                jnp.moveaxis(blocks, 0, 1).reshape(batch, whole * BLOCK, *blocks.shape[3:])
            )
        if middle < last:
            segments = None if segment_ids is None else segment_ids[:, middle:last]
            outputs.append(block(middle, q[:, middle:last], segments, keys, values, key_bias))
    return jnp.concatenate(outputs, axis=1).reshape(batch, length, heads, dim)
