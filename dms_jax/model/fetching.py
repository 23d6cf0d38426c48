"""Attention that reads every key and fetches only a few values (KCache).

    scores over all keys -> log-sum-exp -> the N largest of each query head -> their values -> sum

A query head fetches N values of D numbers. They depend on its scores, so the fetch cannot be part
of the kernel that reads the keys. If N differs by sequence, the values of whole rows are gathered
and unselected ones get weight zero: this measures the selection but saves no reads.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dms_jax.cache import Pool
from dms_jax.cache.host_values import HostRows
from dms_jax.policies.values import Chunk, Reading
from dms_jax.ranking import mark_largest
from pallas_kernels import decode_attention, select_largest

# Numbers in the values gathered at a time from whole rows.
MOST_NUMBERS = 1 << 25


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
    the reading, or `fetch.counts` of each sequence if given; in that case gathered but unselected
    values do not count.
    """
    fetch, page_table, lengths = reading.fetch, reading.page_table, reading.lengths
    assert fetch is not None
    batch, num_kv_heads, _ = page_table.shape
    num_rows, head_dim = batch * num_kv_heads, q.shape[-1]
    table = page_table.reshape(num_rows, -1)
    # The kernel attends to keys and values. With the keys passed as both, it reads only keys from
    # memory (the second read of a tile hits the cache).
    _, lse, scores = decode_attention(
        q.reshape(num_rows, -1, head_dim),
        pool.k_pages,
        pool.k_pages,
        table,
        lengths.reshape(num_rows),
        scale=chunk.static.scale,
        sinks=sinks_of_rows(chunk, num_rows),
        soft_cap=chunk.static.soft_cap,
        return_lse=True,
        return_scores=True,
        k_scales=pool.k_scales,
        v_scales=pool.k_scales,
    )
    count: int | Int[Array, "B 1"]
    if fetch.counts is None:
        count = min(fetch.top, scores.shape[-1])
        slots, best = _select(scores, count)
        chosen = best > -jnp.inf
        weights = jnp.exp(jnp.where(chosen, best - lse[..., None], -jnp.inf))
        values = _values(pool, chunk, page_table, jnp.where(chosen, slots, 0), host, q.dtype)
        values = jnp.where(chosen[..., None], values, 0).astype(scores.dtype)
        out = jnp.einsum("rgn,rgnd->rgd", weights, values)
    else:
        assert host is None  # KCache refuses a ratio with values in host memory
        count = fetch.counts
        out = _attend_whole_rows(pool, q, scores, lse, reading)
    group = scores.shape[1]
    entries = jnp.where(lengths <= count, lengths, (lengths + group * count + 1) // 2)
    return out.astype(q.dtype), entries.sum(-1, dtype=jnp.int32)


def sinks_of_rows(chunk: Chunk, num_rows: int) -> Float[Array, "R g"] | None:
    """Returns the sinks of the query heads of each row (a KV head's, or a single query head's)."""
    if chunk.sinks is None:
        return None
    every = jnp.broadcast_to(chunk.sinks, (chunk.count.size, *chunk.sinks.shape))
    return every.reshape(num_rows, -1)


def _select(
    scores: Float[Array, "R G S"], count: int
) -> tuple[Int[Array, "R G n"], Float[Array, "R G n"]]:
    """Returns the slots of the `count` largest scores of each query head, and those scores."""
    slots = select_largest(scores.reshape(-1, scores.shape[-1]), count)
    slots = slots.reshape(*scores.shape[:2], count)
    best = jnp.take_along_axis(scores, slots, axis=-1)
    # Gather once: XLA would repeat the gather in every comparison of slots.
    return jax.lax.optimization_barrier((slots, best))


def _values(
    pool: Pool,
    chunk: Chunk,
    page_table: Int[Array, "B K M"],
    slots: Int[Array, "R G n"],
    host: HostRows | None,
    dtype: Any,
) -> Float[Array, "R G n D"]:
    """Returns the values of single slots."""
    of_rows = slots.reshape(*page_table.shape[:2], -1)
    if host is None:
        page = jnp.take_along_axis(page_table, of_rows // pool.page_size, axis=-1)
        values = pool.values(page, of_rows % pool.page_size, dtype)
    else:
        values = pool.host_values(host, chunk.tokens.layer, page_table, of_rows, dtype)
    return values.reshape(*slots.shape, -1)


def _attend_whole_rows(
    pool: Pool,
    q: Float[Array, "B H D"],
    scores: Float[Array, "R G S"],
    lse: Float[Array, "R G"],
    reading: Reading,
) -> Float[Array, "R G D"]:
    """Attends to the largest weights, with a different number of values for each sequence.

    Arrays have one size for all sequences: gathered per query head, values would fill the page
    table's full width, which took 7 GB in one allocation (Qwen2.5-0.5B, 16,384 tokens, on an H200).
    Instead rows are gathered once for the query heads that share them, a few rows at a time.
    """
    fetch, page_table = reading.fetch, reading.page_table
    assert fetch is not None
    assert fetch.counts is not None
    num_rows, group, num_slots = scores.shape
    slots = jnp.arange(num_slots)

    def attend(row):
        scores, lse, count, table = row
        chosen = mark_largest(scores, jnp.broadcast_to(count, group)) & (scores > -jnp.inf)
        weights = jnp.exp(jnp.where(chosen, scores - lse[..., None], -jnp.inf))
        values = pool.values(table[slots // pool.page_size], slots % pool.page_size, q.dtype)
        values = jnp.where(chosen.any(0)[:, None], values, 0).astype(scores.dtype)
        return jnp.einsum("gn,nd->gd", weights, values, precision=jax.lax.Precision.HIGHEST)

    counts = jnp.repeat(fetch.counts[:, 0], page_table.shape[1])
    rows = scores, lse, counts, page_table.reshape(num_rows, -1)
    together = max(1, MOST_NUMBERS // (num_slots * q.shape[-1]))
    return jax.lax.map(attend, rows, batch_size=together)
