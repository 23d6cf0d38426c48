"""The plan of the prefill kernels: the key tiles that the queries of a chunk visit.

Keys come in tiles of `TILE`, from two places. Whole tiles of past slots are read in place, from
their pages. The rest, the "dense" keys, are the last partial tile of past slots of each row,
gathered and zeroed beyond its length, followed by the chunk's own keys, zeroed beyond its count, so
the contents of unread slots never enter a product. Every key has an interval [since, until] of the
queries that see it. For each tile of queries a list holds the key tiles to visit: first the tiles
that all its queries see whole, then the tiles masked by the intervals.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.padding import pad_axis
from pallas_kernels.prefill.chunk import Chunk, Past

TILE = 128
NEVER = -1
ALWAYS = 2**30


class Plan(NamedTuple):
    """The other inputs of the kernels, besides queries and pages. T and slots are padded to TILE.

    Attributes:
      dense_k: keys of the tail and of the chunk [B, TILE + T, K, D].
      dense_v: values of the tail and of the chunk [B, TILE + T, K, D].
      since: first query that sees each key, the same for all rows [tiles * TILE].
      until: last query that sees each key, NEVER for none [B, K, tiles * TILE].
      pages: page numbers, all in range [B, K, M].
      visits: key tiles in the order of their visits [B, K, query tiles, tiles].
      ends: ends of the whole and of the partial tiles in `visits` [B, K, query tiles, 2].
    """

    dense_k: jax.Array
    dense_v: jax.Array
    since: jax.Array
    until: jax.Array
    pages: jax.Array
    visits: jax.Array
    ends: jax.Array


def _gather_tail(pages: jax.Array, table: jax.Array, lengths: jax.Array) -> jax.Array:
    """Gathers the slots after each row's last whole tile, [B, K, TILE, D], 0 beyond its length."""
    batch, kv_heads, columns = table.shape
    count, page, dim = pages.shape
    if columns == 0 or count == 0:
        return jnp.zeros((batch, kv_heads, TILE, dim), pages.dtype)
    slots = (lengths // TILE * TILE)[..., None] + jnp.arange(TILE)
    numbers = jnp.take_along_axis(table, jnp.clip(slots // page, 0, columns - 1), axis=2)
    rows = pages.at[jnp.clip(numbers, 0, count - 1), slots % page].get(mode="promise_in_bounds")
    return jnp.where((slots < lengths[..., None])[..., None], rows, 0)


def order_by_sort(whole: jax.Array, partial: jax.Array) -> jax.Array:
    """Lists the whole tiles, then the partial ones; later entries are arbitrary.

    # In: whole [1, 0, 0, 1], partial [0, 1, 0, 0].  Out: [0, 3, 1, ...]
    """
    tiles = whole.shape[-1]
    kind = jnp.where(whole, 0, jnp.where(partial, 1, 2))
    return jnp.sort(kind * tiles + jnp.arange(tiles), axis=-1) % tiles


def order_by_count(whole: jax.Array, partial: jax.Array) -> jax.Array:
    """Lists tiles like `order_by_sort`, without a sort, which is slow to compile for TPUs.

    Slower on a GPU. The p-th whole tile is the number of tiles up to which at most p are whole.
    """
    tiles = whole.shape[-1]
    position = jnp.arange(tiles)[:, None]
    first = whole.sum(-1)[..., None, None]
    # Counts are products with a triangle of ones: exact in float32, and quick to compile.
    triangle = jnp.triu(jnp.ones((tiles, tiles), jnp.float32))
    count = [(kind.astype(jnp.float32) @ triangle)[..., None, :] for kind in (whole, partial)]
    before = jnp.where(position < first, count[0] <= position, count[1] <= position - first)
    return jnp.minimum(before.sum(-1), tiles - 1)


def make_plan(chunk: Chunk, past: Past, window: int, rows: int, order) -> Plan:
    """Plans the visits of query tiles.

    Args:
      chunk: the chunk's keys and values.
      past: the pages of the past.
      window: see `prefill_attention`.
      rows: number of queries in a query tile.
      order: `order_by_sort` or `order_by_count`.
    """
    length, counts, evicted = chunk.k.shape[1], chunk.counts, chunk.evicted
    real = jnp.arange(length) < counts[:, None]

    def dense(keys, source):
        tail = jnp.moveaxis(_gather_tail(source, past.page_table, past.lengths), 1, 2)
        keys = jnp.where(real[..., None, None], keys, 0)
        return jnp.concatenate([tail, pad_axis(keys, 1, TILE)], axis=1)

    past_tiles = past.page_table.shape[2] * past.page_size // TILE
    slots = past_tiles * TILE
    whole = (past.lengths // TILE * TILE)[..., None]
    tail_slots = whole + jnp.arange(TILE)
    if past.until.shape[2]:
        at_tail = jnp.clip(tail_slots, 0, past.until.shape[2] - 1)
        tail_until = jnp.take_along_axis(past.until, at_tail, axis=2)
    else:
        tail_until = jnp.full(tail_slots.shape, NEVER)
    tail_until = jnp.where(tail_slots < past.lengths[..., None], tail_until, NEVER)
    past_until = jnp.where(jnp.arange(slots) < whole, past.until[..., :slots], NEVER)
    position = jnp.arange(length)
    chunk_until = jnp.where(evicted, position + window, ALWAYS)
    chunk_until = jnp.where(real[:, None], chunk_until, NEVER)
    until = [past_until, tail_until, pad_axis(chunk_until, 2, TILE, constant_values=NEVER)]
    until = jnp.concatenate([x.astype(jnp.int32) for x in until], axis=2)
    since = pad_axis(position, 0, TILE, constant_values=ALWAYS)
    since = jnp.pad(since, (slots + TILE, 0)).astype(jnp.int32)

    def by_tile(x):
        return x.reshape(*x.shape[:-1], 1, -1, TILE)

    queries = -(-length // TILE) * TILE // rows
    first = (jnp.arange(queries) * rows)[:, None]
    real_last = jnp.minimum(first + rows, counts[:, None, None, None]) - 1
    seen_until = jnp.minimum(by_tile(until).max(-1), real_last)
    visible = (seen_until >= jnp.maximum(by_tile(since).min(-1), first)) & (real_last >= first)
    full = (by_tile(until).min(-1) >= real_last) & (by_tile(since).max(-1) <= first)
    visits = order(visible & full, visible & ~full)
    ends = jnp.stack([(visible & full).sum(-1), visible.sum(-1)], axis=-1)
    pages = jnp.clip(past.page_table, 0, max(past.k_pages.shape[0] - 1, 0))
    return Plan(
        dense(chunk.k, past.k_pages),
        dense(chunk.v, past.v_pages),
        since,
        until,
        pages.astype(jnp.int32),
        visits.astype(jnp.int32),
        ends.astype(jnp.int32),
    )
