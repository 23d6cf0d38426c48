"""Prompt attention over paged past keys and the chunk itself, in plain XLA.

Chunk query i of sequence b attends, for each KV head, to

    chunk key j  iff  j <= i and (i - j <= window or not evicted[b, k, j])
    past slot s  iff  s < past_lengths[b, k] and i <= past_until[b, k, s]

with a soft cap of its scores and the sink of its head, if there are any. Slot s of row (b, k) lives
in page `page_table[b, k, s // P]` at offset `s % P`. This is the binary form of the DMS mask
(Łańcucki et al. 2025, section 3.2). Blocks of `BLOCK` queries run one after the other, so memory is
linear in the length of the chunk.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.prefill.chunk import Chunk, Past
from pallas_kernels.training.reference import einsum

BLOCK = 128
HIDDEN = -1e30


def gather_rows(
    pages: Float[Array, "N P D"],
    page_table: Int[Array, "B K M"],
    lengths: Int[Array, "B K"],
) -> Float[Array, "B K S D"]:
    """Gathers the slots of every row in order, S = M * P, with zeros beyond the row's length."""
    batch, heads, pages_per_row = page_table.shape
    _, page, dim = pages.shape
    slots = pages_per_row * page
    if slots == 0 or pages.shape[0] == 0:
        return jnp.zeros((batch, heads, slots, dim), pages.dtype)
    rows = jnp.take(pages, page_table, axis=0, mode="clip").reshape(batch, heads, slots, dim)
    return jnp.where((jnp.arange(slots) < lengths[..., None])[..., None], rows, 0)


def prefill_attention_reference(
    q: Float[Array, "B T H D"],
    chunk: Chunk,
    past: Past,
    sinks: Float[Array, " H"] | None = None,
    *,
    window: int,
    scale: float,
    soft_cap: float | None = None,
) -> Float[Array, "B T H D"]:
    """Computes `prefill_attention` in XLA."""
    batch, length, heads, dim = q.shape
    kv_heads = chunk.k.shape[2]
    valid = jnp.arange(length) < chunk.counts[:, None]
    # Causality masks the scores of padded keys, but their values may still be NaN.
    chunk_k = jnp.moveaxis(jnp.where(valid[..., None, None], chunk.k, 0), 1, 2)
    chunk_v = jnp.moveaxis(jnp.where(valid[..., None, None], chunk.v, 0), 1, 2)
    past_k = gather_rows(past.k_pages, past.page_table, past.lengths)
    keys = jnp.concatenate([past_k, chunk_k], axis=2)
    past_v = gather_rows(past.v_pages, past.page_table, past.lengths)
    values = jnp.concatenate([past_v, chunk_v], axis=2)
    live = jnp.arange(past.until.shape[2]) < past.lengths[..., None]

    def block(start, q_block):
        q_block = q_block.reshape(batch, -1, kv_heads, heads // kv_heads, dim)
        scores = scale * einsum("bnkgd,bksd->bkgns", q_block, keys)
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        index = start + jnp.arange(q_block.shape[1])
        see_past = live[:, :, None, :] & (index[:, None] <= past.until[:, :, None, :])
        distance = index[:, None] - jnp.arange(length)[None, :]
        see_chunk = (distance >= 0) & ((distance <= window) | ~chunk.evicted[:, :, None, :])
        visible = jnp.concatenate([see_past, see_chunk], axis=-1)[:, :, None]
        scores = jnp.where(visible, scores, HIDDEN)
        if sinks is None:
            weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
        else:
            own = sinks.astype(scores.dtype).reshape(kv_heads, -1, 1, 1)
            own = jnp.broadcast_to(own, (*scores.shape[:-1], 1))
            weights = jax.nn.softmax(jnp.concatenate([scores, own], axis=-1), axis=-1)
            weights = weights[..., :-1].astype(values.dtype)
        out = einsum("bkgns,bksd->bnkgd", weights, values)
        return out.reshape(batch, -1, heads, dim).astype(q.dtype)

    if length <= BLOCK:
        out = block(0, q)
    else:
        padded = jnp.pad(q, ((0, 0), (0, -length % BLOCK), (0, 0), (0, 0)))

        def step(index):
            start = index * BLOCK
            return block(start, jax.lax.dynamic_slice_in_dim(padded, start, BLOCK, axis=1))

        blocks = jax.lax.map(step, jnp.arange(padded.shape[1] // BLOCK))
        out = jnp.moveaxis(blocks, 0, 1).reshape(padded.shape)[:, :length]
    return jnp.where(valid[..., None, None], out, 0)
