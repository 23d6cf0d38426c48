"""Eviction by cutting rows to the slots that their policy keeps, which frees pages.

After a prompt, and between the tokens of a chunk, each layer cuts its own rows. After a decode step
the rows of all layers are cut together, after the last layer. So the check for due rows runs once
per step; once per layer the host would wait for the device each time. And a cut costs only as much
as its due rows.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from dms_jax import sharding
from dms_jax.cache import Pool, compact, load
from dms_jax.policies.base import Policy
from dms_jax.policies.values import Chunk, PolicyState, Rows
from dms_jax.sharding import cache_spec, partition

# The most numbers in the keys that one pass cuts after a decode step. A scorer holds several 32-bit
# numbers for each: with 450 sequences of SmolLM2-135M and page tables of 4,240 slots, a pass of
# ExpectedAttention took 4 GB.
MOST_NUMBERS = 1 << 25


@no_type_check  # jax also builds it from shapes and from partitions
@struct.dataclass
class LayerCache:
    """One layer's view of the cache: the whole pool, and the state of its own rows."""

    pool: Pool
    state: PolicyState


def gather_rows(
    pool: Pool,
    page_table: Array,
    lengths: Array,
    dtype: Any,
    center: Float[Array, "*B K D"] | None = None,
) -> Rows:
    """Gathers the keys and values of a layer's rows.

    `center` is what the stored keys lack (`Chunk.key_center`).
    """
    k_pages, v_pages, page_table = pool.readable(page_table, dtype)
    k = load(k_pages, page_table, lengths)
    rows = Rows(k=k, v=load(v_pages, page_table, lengths), lengths=lengths)
    if center is None:
        return rows
    whole = (k + center[..., None, :]).astype(k.dtype)
    return dataclasses.replace(rows, k=jnp.where(rows.live[..., None], whole, 0))


def cut_layer(
    policy: Policy,
    cache: LayerCache,
    chunk: Chunk,
    lengths: Int[Array, "B K"],
    which: Bool[Array, " B"],
    *,
    dtype: Any,
    q: Array | None = None,
) -> tuple[LayerCache, Int[Array, "B K"]]:
    """Cuts one layer's rows.

    This is a loop of at most one iteration: if no sequence is due nothing is computed, and a loop,
    unlike a conditional, updates the pool in place.

    Args:
      policy: the policy, which returns the retention mask (`Policy.survivors`).
      cache: the pool and the layer's policy state.
      chunk: the most recent tokens.
      lengths: number of slots in use in each row.
      which: whether each sequence is cut.
      dtype: floating-point type of the keys and values passed to the policy.
      q: rotated queries of the chunk; None after a decode step.
    """

    def cut(carry):
        pool, pages, lengths, _ = carry
        state = PolicyState(rows=cache.state.rows, pages=pages)
        rows = gather_rows(pool, chunk.page_table, lengths, dtype, chunk.key_center)
        keep = policy.survivors(state, chunk, rows, q)
        keep = rows.live & (keep | ~which[:, None, None])
        (pool, pages), lengths = compact((pool, pages), chunk.page_table, keep)
        return pool, pages, lengths, jnp.zeros_like(which.any())

    with jax.named_scope("cut"):
        pool, pages, lengths, _ = jax.lax.while_loop(
            lambda carry: carry[-1],
            cut,
            (cache.pool, cache.state.pages, lengths, which.any()),
        )
    state = dataclasses.replace(cache.state, pages=pages)
    return LayerCache(pool=pool, state=state), lengths


def cut_layers(
    policy: Policy,
    pool: Pool,
    state: PolicyState,
    chunk: Chunk,
    page_table: Int[Array, "L B K M"],
    lengths: Int[Array, "L B K"],
    *,
    centers: Float[Array, "L K D"] | None,
    windowed: Sequence[bool] = (),
    dtype: Any,
) -> tuple[Pool, PolicyState, Int[Array, "L B K"], Int[Array, " B"]]:
    """Cuts the rows of all layers that are `due` after a decode step.

    The last result is the number of entries read again for scoring: all slots in use of the cut
    rows.

    Args:
      policy: the policy of all layers.
      pool: the whole pool.
      state: the policy's state; arrays per row have a leading axis of layers.
      chunk: the properties of the step's tokens that all layers share.
      page_table, lengths: pages and slots in use of the rows of all layers.
      centers: what the stored keys of each layer lack (`Chunk.key_center`).
      windowed: whether each layer keeps a window and is not cut; empty for none.
      dtype: see `cut_layer`.
    """
    if any(windowed):
        cut = np.flatnonzero(np.logical_not(windowed))
        own = dataclasses.replace(state, rows=state.rows.growing)
        centers = None if centers is None else centers[cut]
        pool, own, shorter, reads = cut_layers(
            policy, pool, own, chunk, page_table[cut], lengths[cut], centers=centers, dtype=dtype
        )
        rows = dataclasses.replace(state.rows, growing=own.rows)
        return pool, dataclasses.replace(own, rows=rows), lengths.at[cut].set(shorter), reads

    def due_of(layer, row_state, page_table, lengths):
        tokens = dataclasses.replace(chunk.tokens, layer=layer)
        own = dataclasses.replace(chunk, tokens=tokens, page_table=page_table, lengths=lengths)
        return policy.due(PolicyState(rows=row_state, pages=state.pages), lengths, own)

    due = jax.vmap(due_of)(jnp.arange(lengths.shape[0]), state.rows, page_table, lengths)
    if due is None:
        return pool, state, lengths, jnp.zeros_like(chunk.count)
    due &= chunk.count > 0
    reads = jnp.where(due, lengths.sum(-1), 0).sum(0, dtype=jnp.int32)
    cache = LayerCache(pool, state)
    with jax.named_scope("cut_layers"):
        given = chunk, page_table, lengths, due, centers
        cache, lengths = _cut_sharded(policy, cache, *given, dtype=dtype)
    return cache.pool, cache.state, lengths, reads


def _cut_sharded(
    policy, cache, chunk, page_table, lengths, due, centers, *, dtype
) -> tuple[LayerCache, Array]:
    """Runs `_cut_due` per shard."""
    cut = functools.partial(_cut_due, dtype=dtype)
    if not sharding.has_mesh():
        return cut(policy, cache, chunk, page_table, lengths, due, centers)
    data, model = sharding.row_axes(*chunk.lengths.shape)
    chunk = split_heads(chunk, model)
    cache_specs = partition(cache, data, model)
    state = cache_specs.state
    of_layers = jax.tree.map(lambda spec: PartitionSpec(None, *spec), state.rows)
    cache_specs = dataclasses.replace(cache_specs, state=dataclasses.replace(state, rows=of_layers))
    rows = PartitionSpec(None, *cache_spec(("sequences", "kv_heads"), data, model))
    sequences = PartitionSpec(None, *cache_spec(("sequences",), data, model))
    heads = PartitionSpec(None, *cache_spec(("kv_heads",), data, model))
    mapped = jax.shard_map(
        functools.partial(cut, policy),
        in_specs=(cache_specs, partition(chunk, data, model), rows, rows, sequences, heads),
        out_specs=(cache_specs, rows),
        check_vma=False,
    )
    return mapped(cache, chunk, page_table, lengths, due, centers)


def _cut_due(
    policy: Policy,
    cache: LayerCache,
    chunk: Chunk,
    page_table: Int[Array, "L B K M"],
    lengths: Int[Array, "L B K"],
    due: Bool[Array, "L B"],
    centers: Float[Array, "L K D"] | None,
    *,
    dtype: Any,
) -> tuple[LayerCache, Int[Array, "L B K"]]:
    """Cuts the due rows, a few (layer, sequence) pairs per pass, and touches nothing else.

    A pass has one pair per sequence, or fewer if `MOST_NUMBERS` requires. Sequences are seldom due
    together: of 256 whose rows are cut every 16 tokens, 16 are due per step. A pair is a batch of
    one sequence, so a pass may mix layers.
    """
    num_layers, batch = due.shape
    *_, page_size, head_dim = cache.pool.k_pages.shape
    of_a_pair = math.prod(page_table.shape[2:]) * page_size * head_dim
    pairs = max(1, min(batch, MOST_NUMBERS // of_a_pair))

    def cut(carry):
        pool, pages, lengths, due = carry
        pair = jnp.nonzero(due.ravel(), size=pairs, fill_value=due.size)[0]
        place = pair // batch, pair % batch  # layer L: no pair

        def take(x):
            return x.at[place].get(mode="clip")

        def of_pairs(x):
            return x if x.ndim == 0 else x[place[1], None]

        used = jnp.where((pair < due.size)[:, None], take(lengths), 0)
        center = None if centers is None else centers.at[place[0]].get(mode="clip")
        rows = gather_rows(pool, take(page_table), used, dtype, center)
        own = jax.tree.map(of_pairs, chunk)
        own = dataclasses.replace(
            own,
            tokens=dataclasses.replace(own.tokens, layer=jnp.minimum(place[0], num_layers - 1)),
            page_table=take(page_table)[:, None],
            lengths=used[:, None],
        )

        def survivors(row_state, chunk, rows):
            state = PolicyState(rows=row_state, pages=pages)
            return policy.survivors(state, chunk, rows, None)

        one_each = jax.tree.map(lambda x: x[:, None], (jax.tree.map(take, cache.state.rows), rows))
        keep = jax.vmap(survivors)(one_each[0], own, one_each[1])[:, 0]
        (pool, pages), used = compact((pool, pages), take(page_table), rows.live & keep)
        lengths = lengths.at[place].set(used, mode="drop")
        return pool, pages, lengths, due.at[place].set(False, mode="drop")

    pool, pages, lengths, _ = jax.lax.while_loop(
        lambda carry: carry[-1].any(), cut, (cache.pool, cache.state.pages, lengths, due)
    )
    return LayerCache(pool, dataclasses.replace(cache.state, pages=pages)), lengths


def split_heads(chunk: Chunk, head_axis: sharding.Axes | None) -> Chunk:
    """Returns the chunk as seen inside `shard_map`, with KV heads sharded over `head_axis`."""
    return dataclasses.replace(chunk, static=dataclasses.replace(chunk.static, head_axis=head_axis))
