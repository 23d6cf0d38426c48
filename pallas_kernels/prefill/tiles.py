"""Which key tiles a chunk's queries visit: the plan that the prefill kernels walk.

Keys come in tiles of `TILE` and from two places. Whole tiles of past slots are read where they
lie, in their pages. The rest, "dense" keys, are the last partial tile of past slots of each row,
gathered and zeroed beyond its length, followed by the chunk's own keys, zeroed beyond its count: so
whatever an unread slot holds never enters a product. Every key has an interval [since, until] of
the queries that see it, and for each tile of queries a list names the key tiles worth a visit:
first those that all of its queries see whole, then those that need the intervals.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

TILE = 128
NEVER = -1
ALWAYS = 2**30


class Plan(NamedTuple):
    """What the kernels read beside the queries and the pages. T and slots are padded to TILE.

    Attributes:
      dense_k: tail and chunk keys [B, TILE + T, K, D].
      dense_v: tail and chunk values [B, TILE + T, K, D].
      since: first query that sees each key, for all rows alike [tiles * TILE].
      until: last query that sees each key, NEVER for none [B, K, tiles * TILE].
      pages: page numbers, all in range [B, K, past tiles * pages of a tile].
      visits: key tiles in order of visit [B, K, query tiles, tiles].
      ends: where the whole tiles and the partial ones end in `visits` [B, K, query tiles, 2].
    """

    dense_k: jax.Array
    dense_v: jax.Array
    since: jax.Array
    until: jax.Array
    pages: jax.Array
    visits: jax.Array
    ends: jax.Array


def pad_axis(x: jax.Array, axis: int, multiple: int, value=0) -> jax.Array:
    """Pad one axis up to a multiple; no operation if it is one already."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % multiple)
    return jnp.pad(x, widths, constant_values=value) if widths[axis][1] else x


def _gather_tail(pages: jax.Array, table: jax.Array, lengths: jax.Array) -> jax.Array:
    """Give the slots after each row's last whole tile, [B, K, TILE, D], zero beyond its length."""
    batch, kv_heads, columns = table.shape
    count, page, dim = pages.shape
    if columns == 0 or count == 0:
        return jnp.zeros((batch, kv_heads, TILE, dim), pages.dtype)
    slots = (lengths // TILE * TILE)[..., None] + jnp.arange(TILE)
    numbers = jnp.take_along_axis(table, jnp.clip(slots // page, 0, columns - 1), axis=2)
    rows = pages.at[jnp.clip(numbers, 0, count - 1), slots % page].get(mode="promise_in_bounds")
    return jnp.where((slots < lengths[..., None])[..., None], rows, 0)


def order_by_sort(whole: jax.Array, partial: jax.Array) -> jax.Array:
    """List the tiles that are whole, then those that are partial; what follows has no meaning.

    # In: whole [1, 0, 0, 1], partial [0, 1, 0, 0].  Out: [0, 3, 1, ...]
    """
    tiles = whole.shape[-1]
    kind = jnp.where(whole, 0, jnp.where(partial, 1, 2))
    return jnp.sort(kind * tiles + jnp.arange(tiles), axis=-1) % tiles


def order_by_count(whole: jax.Array, partial: jax.Array) -> jax.Array:
    """Do as `order_by_sort` without a sort, which takes TPUs long to compile; slower on a GPU.

    The p-th whole tile is the number of tiles before which at most p whole ones lie.
    """
    tiles = whole.shape[-1]
    position = jnp.arange(tiles)[:, None]
    first = whole.sum(-1)[..., None, None]
    # Counts as products with a triangle of ones: exact in float32, quick to compile.
    triangle = jnp.triu(jnp.ones((tiles, tiles), jnp.float32))
    count = [(kind.astype(jnp.float32) @ triangle)[..., None, :] for kind in (whole, partial)]
    before = jnp.where(position < first, count[0] <= position, count[1] <= position - first)
    return jnp.minimum(before.sum(-1), tiles - 1)


def make_plan(
    k,
    v,
    evicted,
    counts,
    k_pages,
    v_pages,
    page_table,
    past_lengths,
    past_until,
    window,
    rows,
    order,
) -> Plan:
    """Plan the visits of query tiles of `rows` queries; arguments as for `prefill_attention`.

    `order(whole, partial)` lists tiles, and is one of the two above.
    """
    length = k.shape[1]
    pool, page, _ = k_pages.shape
    real = jnp.arange(length) < counts[:, None]

    def dense(chunk, source):
        tail = jnp.moveaxis(_gather_tail(source, page_table, past_lengths), 1, 2)
        chunk = jnp.where(real[..., None, None], chunk, 0)
        return jnp.concatenate([tail, pad_axis(chunk, 1, TILE)], axis=1)

    past_tiles = page_table.shape[2] * page // TILE
    slots = past_tiles * TILE
    whole = (past_lengths // TILE * TILE)[..., None]
    tail_slots = whole + jnp.arange(TILE)
    if past_until.shape[2]:
        at_tail = jnp.clip(tail_slots, 0, past_until.shape[2] - 1)
        tail_until = jnp.take_along_axis(past_until, at_tail, axis=2)
    else:
        tail_until = jnp.full(tail_slots.shape, NEVER)
    tail_until = jnp.where(tail_slots < past_lengths[..., None], tail_until, NEVER)
    past = jnp.where(jnp.arange(slots) < whole, past_until[..., :slots], NEVER)
    position = jnp.arange(length)
    chunk_until = jnp.where(evicted, position + window, ALWAYS)
    chunk_until = jnp.where(real[:, None], chunk_until, NEVER)
    until = [past, tail_until, pad_axis(chunk_until, 2, TILE, NEVER)]
    until = jnp.concatenate([x.astype(jnp.int32) for x in until], axis=2)
    since = jnp.pad(pad_axis(position, 0, TILE, ALWAYS), (slots + TILE, 0)).astype(jnp.int32)

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
    pages = jnp.clip(page_table, 0, max(pool - 1, 0))
    return Plan(
        dense(k, k_pages),
        dense(v, v_pages),
        since,
        until,
        pages.astype(jnp.int32),
        visits.astype(jnp.int32),
        ends.astype(jnp.int32),
    )
