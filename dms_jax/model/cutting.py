"""Eviction by cutting rows to the slots that their policy keeps, which frees the pages after them.

After a prompt, and between the tokens of a chunk, each layer cuts its own rows. After a decode step
all layers are cut together, behind the last one: whether any row is due is then checked once per
step, not once per layer, which would make the host wait for the device each time.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from dms_jax import sharding
from dms_jax.cache import Pool, compact, load
from dms_jax.model.layer_cache import LayerCache
from dms_jax.policies.base import Policy
from dms_jax.policies.values import Chunk, PolicyState, Rows
from dms_jax.sharding import cache_spec, partition


def gather_rows(pool: Pool, page_table: Array, lengths: Array, dtype: Any) -> Rows:
    """Gathers the keys and values of a layer's rows."""
    k_pages, v_pages, page_table = pool.readable(page_table, dtype)
    return Rows(
        k=load(k_pages, page_table, lengths),
        v=load(v_pages, page_table, lengths),
        lengths=lengths,
    )


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

    This is a loop of at most one iteration: where no sequence is due nothing is computed, and
    unlike the branches of a conditional a loop updates the pool in place.

    Args:
      policy: the policy that gives the retention mask (`Policy.survivors`).
      cache: the pool and the layer's policy state.
      chunk: the most recent tokens.
      lengths: number of slots in use in each row.
      which: whether each sequence is cut.
      dtype: floating-point type in which the policy sees keys and values.
      q: rotated queries of the chunk; None after a decode step.
    """

    def cut(carry):
        pool, pages, lengths, _ = carry
        state = PolicyState(rows=cache.state.rows, pages=pages)
        rows = gather_rows(pool, chunk.page_table, lengths, dtype)
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
    dtype: Any,
) -> tuple[Pool, PolicyState, Int[Array, "L B K"], Int[Array, " B"]]:
    """Cuts the rows of all layers that are `due` after a decode step.

    The last result is the number of entries that were read again for scoring: all slots in use of
    the rows that were cut.

    Args:
      policy: the policy of all layers.
      pool: the whole pool.
      state: the policy's state; arrays per row have a leading axis of layers.
      chunk: the properties of the step's tokens that all layers share.
      page_table, lengths: pages and slots in use of the rows of all layers.
      dtype: see `cut_layer`.
    """
    layers = jnp.arange(lengths.shape[0])

    def of_layer(layer, page_table, lengths) -> Chunk:
        tokens = dataclasses.replace(chunk.tokens, layer=layer)
        return dataclasses.replace(chunk, tokens=tokens, page_table=page_table, lengths=lengths)

    def due_of(layer, page_table, lengths):
        return policy.due(lengths, of_layer(layer, page_table, lengths))

    due = jax.vmap(due_of)(layers, page_table, lengths)
    if due is None:
        return pool, state, lengths, jnp.zeros_like(chunk.count)
    due &= chunk.count > 0
    reads = jnp.where(due, lengths.sum(-1), 0).sum(0, dtype=jnp.int32)

    def cut(carry):
        pool, pages, lengths, _ = carry

        def layer_after_layer(carry, xs):
            pool, pages = carry
            layer, page_table, lengths, rows, which = xs
            cache = LayerCache(pool, PolicyState(rows=rows, pages=pages))
            chunk = of_layer(layer, page_table, lengths)
            cache, lengths = _cut_sharded(policy, cache, chunk, which, dtype=dtype)
            return (cache.pool, cache.state.pages), lengths

        (pool, pages), lengths = jax.lax.scan(
            layer_after_layer, (pool, pages), (layers, page_table, lengths, state.rows, due)
        )
        return pool, pages, lengths, jnp.zeros_like(due.any())

    with jax.named_scope("cut_layers"):
        pool, pages, lengths, _ = jax.lax.while_loop(
            lambda carry: carry[-1], cut, (pool, state.pages, lengths, due.any())
        )
    return pool, dataclasses.replace(state, pages=pages), lengths, reads


def _cut_sharded(policy, cache, chunk, which, *, dtype) -> tuple[LayerCache, Array]:
    """Runs `cut_layer` after a decode step, per shard."""

    def cut(cache, chunk, which):
        return cut_layer(policy, cache, chunk, chunk.lengths, which, dtype=dtype)

    if not sharding.has_mesh():
        return cut(cache, chunk, which)
    data, model = sharding.row_axes(*chunk.lengths.shape)
    chunk = split_heads(chunk, model)
    cache_specs = partition(cache, data, model)
    mapped = jax.shard_map(
        cut,
        in_specs=(
            cache_specs,
            partition(chunk, data, model),
            cache_spec(("sequences",), data, model),
        ),
        out_specs=(cache_specs, cache_spec(("sequences", "kv_heads"), data, model)),
        check_vma=False,
    )
    return mapped(cache, chunk, which)


def split_heads(chunk: Chunk, head_axis: str | None) -> Chunk:
    """Returns the chunk as seen inside `shard_map`, with KV heads sharded over `head_axis`."""
    return dataclasses.replace(chunk, static=dataclasses.replace(chunk.static, head_axis=head_axis))
