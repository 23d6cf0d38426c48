"""Attention that reads every key and fetches only a few values (KCache).

    scores over all keys -> log-sum-exp -> the N largest of each query head -> their values -> sum

A query head fetches N values of D numbers. Which ones depends on its scores, so the fetch cannot be
part of the kernel that reads the keys.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dms_jax.cache import Pool
from dms_jax.cache.host_values import HostRows
from dms_jax.policies.values import Chunk, Reading
from pallas_kernels import decode_attention, select_largest


def attend_to_fetched(
    pool: Pool,
    q: Float[Array, "B H D"],
    chunk: Chunk,
    reading: Reading,
    host: HostRows | None,
) -> tuple[Float[Array, "R G D"], Int[Array, " B"]]:
    """Returns the attention outputs of single queries, and the number of entries read.

    An entry is a key and its value: reading only a key, or fetching a value, counts as half an
    entry, rounded up per row. Rows of at most N tokens are read in full, once. N is `fetch.top` of
    the reading, or `fetch.counts` of each sequence if given.
    """
    fetch, page_table, lengths = reading.fetch, reading.page_table, reading.lengths
    assert fetch is not None
    batch, num_kv_heads, _ = page_table.shape
    num_rows, head_dim = batch * num_kv_heads, q.shape[-1]
    table = page_table.reshape(num_rows, -1)
    # The kernel attends to keys and values; given the keys as both, it reads only keys from memory
    # (the second read of a tile hits the cache).
    _, lse, scores = decode_attention(
        pool.rotate(q).reshape(num_rows, -1, head_dim),
        pool.k_pages,
        pool.k_pages,
        table,
        lengths.reshape(num_rows),
        scale=chunk.static.scale,
        return_lse=True,
        return_scores=True,
        k_scales=pool.k_scales,
        v_scales=pool.k_scales,
    )
    group = scores.shape[1]
    top = min(fetch.top, scores.shape[-1])
    slots = select_largest(scores.reshape(num_rows * group, -1), top)
    slots = slots.reshape(num_rows, group, top)
    best = jnp.take_along_axis(scores, slots, axis=-1)
    # Gathered once: XLA would repeat the gather for every slot that a slot is compared with.
    slots, best = jax.lax.optimization_barrier((slots, best))
    live = best > -jnp.inf
    count: int | Int[Array, "B 1"] = top
    if fetch.counts is not None:
        count = fetch.counts
        rank = jnp.argsort(jnp.argsort(-best, axis=-1, stable=True), axis=-1)
        live &= rank < jnp.repeat(fetch.counts, num_kv_heads, axis=0)[..., None]
    weights = jnp.exp(jnp.where(live, best - lse[..., None], -jnp.inf))
    if fetch.renormalize:
        total = weights.sum(-1, keepdims=True)
        weights = weights / jnp.where(total > 0, total, 1)
    slots = jnp.where(live, slots, 0).reshape(batch, num_kv_heads, -1)
    if host is None:
        page = jnp.take_along_axis(page_table, slots // pool.page_size, axis=-1)
        values = pool.values(page, slots % pool.page_size, q.dtype)
    else:
        values = pool.host_values(host, chunk.tokens.layer, page_table, slots, q.dtype)
    values = jnp.where(live[..., None], values.reshape(num_rows, group, top, head_dim), 0)
    wide = scores.dtype
    out = jnp.einsum("rgn,rgnd->rgd", weights, values.astype(wide)).astype(q.dtype)
    entries = jnp.where(lengths <= count, lengths, (lengths + group * count + 1) // 2)
    return out, entries.sum(-1, dtype=jnp.int32)
