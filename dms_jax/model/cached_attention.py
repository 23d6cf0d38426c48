"""Attention of one layer over the paged cache: write, read, observe, shrink.

The whole of it runs inside `shard_map`: rows never cross devices, page numbers are local, and the
only thing a policy may reduce over devices is a mean over heads.
"""

import dataclasses
import functools
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from dms_jax import sharding
from dms_jax.cache import Pool, compact, load
from dms_jax.cache.host_values import HostRows
from dms_jax.model.fetching import attend_to_fetched
from dms_jax.model.rope import apply_rope
from dms_jax.policies.base import Chunk, Placement, Policy, PolicyState, Rows
from pallas_kernels import decode_attention, prefill_attention


@no_type_check  # jax also builds it of shapes and of partitions
@struct.dataclass
class LayerCache:
    """What one layer sees of the cache: the whole pool, its own rows."""

    pool: Pool
    state: PolicyState


@no_type_check  # jax also builds it of shapes and of partitions
@struct.dataclass
class Attended:
    """What attention over a chunk leaves behind.

    `live` and `reads` are totals over the layer's KV heads, for each token of the chunk.
    """

    out: Float[Array, "B T H D"]
    cache: LayerCache
    lengths: Int[Array, "B K"]
    live: Int[Array, "B T"]
    reads: Int[Array, "B T"]


def attend_cached(
    policy: Policy,
    cache: LayerCache,
    q: Float[Array, "B T H D"],
    chunk: Chunk,
    cos: Float[Array, "B T half"],
    sin: Float[Array, "B T half"],
    *,
    prompt: bool,
    scale: float,
    host: HostRows | None = None,
) -> Attended:
    """Runs a chunk of T tokens through one layer's cache, shard by shard.

    Args:
      policy: the layer's policy.
      cache: the pool and the layer's policy state.
      q: rotated queries, borrowed neurons zeroed.
      chunk: the tokens, keys unrotated.
      cos, sin: rotation of the chunk's positions.
      prompt: whether these are tokens of a prompt (some policies treat them differently).
      scale: factor on the dot products.
      host: values in host memory, of layers whose policy fetches them; none of them under a mesh.
    """
    arguments = (cache, q, chunk, cos, sin)
    if policy.fetches is None:
        host = None
    attend = functools.partial(_attend, policy, prompt=prompt, scale=scale, host=host)
    if not sharding.has_mesh():
        return attend(*arguments, head_axis=None)
    data, model = sharding.row_axes(*chunk.lengths.shape)
    spec = functools.partial(_partition, data=data, model=model)
    result = jax.eval_shape(functools.partial(attend, head_axis=None), *arguments)
    mapped = jax.shard_map(
        functools.partial(attend, head_axis=model),
        in_specs=tuple(spec(argument) for argument in arguments),
        out_specs=spec(result),
        check_vma=False,
    )
    return mapped(*arguments)


# Fields whose first axis is that of the sequences, with none for heads.
PER_SEQUENCE = ("live", "reads", "positions", "count", "horizon", "ends_prompt", "future")


def _partition(tree: Any, data: str | None, model: str | None) -> Any:
    """The partition of every array that crosses the boundary of shard_map, by its field."""
    pool = PartitionSpec(tuple(axis for axis in (data, model) if axis))
    tokens_heads = PartitionSpec(data, None, model)
    rows = PartitionSpec(data, model)

    def of(path: tuple, leaf: Any) -> PartitionSpec:
        del leaf
        names = [getattr(key, "name", None) for key in path]
        if "pool" in names or "pages" in names:
            return pool
        if names and names[0] in ("out", "k", "v", "queries"):
            return tokens_heads
        if names and names[0] in PER_SEQUENCE:
            return PartitionSpec(data)
        if names and names[0] == "layer":
            return PartitionSpec()
        return rows  # decisions, page_table, lengths, state.rows

    if hasattr(tree, "shape"):  # q is [B, T, H, D], cos and sin are [B, T, D/2]
        return tokens_heads if len(tree.shape) == 4 else PartitionSpec(data)
    return jax.tree_util.tree_map_with_path(of, tree)


def _attend(
    policy: Policy,
    cache: LayerCache,
    q: Float[Array, "B T H D"],
    chunk: Chunk,
    cos: Float[Array, "B T half"],
    sin: Float[Array, "B T half"],
    *,
    prompt: bool,
    scale: float,
    host: HostRows | None,
    head_axis: str | None,
) -> Attended:
    num_tokens = q.shape[1]
    options: dict[str, Any] = dict(scale=scale, host=host, head_axis=head_axis)
    # A prompt that is read whole (Quest) stays so in chunks of one token.
    in_one_pass = policy.parallel(prompt=prompt)
    if in_one_pass and (num_tokens > 1 or not policy.parallel(prompt=False)):
        attended = _parallel(policy, cache, q, chunk, cos, sin, **options)
    elif num_tokens == 1:
        attended = _step(policy, cache, q, chunk, cos, sin, **options)
    else:
        attended = _token_by_token(policy, cache, q, chunk, cos, sin, **options)
    if head_axis is not None:
        attended = dataclasses.replace(
            attended,
            live=jax.lax.psum(attended.live, head_axis),
            reads=jax.lax.psum(attended.reads, head_axis),
        )
    return attended


def _write(
    policy: Policy,
    cache: LayerCache,
    q: Array,
    chunk: Chunk,
    cos: Array,
    sin: Array,
    host: HostRows | None,
) -> tuple[LayerCache, Chunk, Placement]:
    """Merges, rotates, places and stores the chunk's keys and values."""
    with jax.named_scope("cache_write"):
        state, chunk = policy.transform(cache.state, chunk)
        _, k = policy.clear_borrowed(q, apply_rope(chunk.k, cos, sin))
        pool = cache.pool
        chunk = dataclasses.replace(chunk, k=pool.as_stored(k), v=pool.as_stored(chunk.v))
        state, placement = policy.write(state, chunk)
        away = None
        if host is not None:
            assert chunk.layer is not None
            away = (chunk.layer, chunk.positions)
        pool = pool.store(
            chunk.page_table,
            placement.slots,
            placement.k,
            placement.v,
            away=away,
        )
        state = policy.stored(state, pool, chunk, placement)
    return LayerCache(pool=pool, state=state), chunk, placement


def _parallel(policy, cache, q, chunk, cos, sin, *, scale, host, head_axis) -> Attended:
    """All queries in one pass, over what was there before and over the chunk itself."""
    before = cache.pool
    cache, chunk, placement = _write(policy, cache, q, chunk, cos, sin, host)
    with jax.named_scope("prefill_attention"):
        k_pages, v_pages, page_table = before.readable(chunk.page_table, q.dtype, host)
        out = prefill_attention(
            q,
            placement.k,
            placement.v,
            placement.evicted,
            chunk.count,
            k_pages,
            v_pages,
            page_table,
            chunk.lengths,
            placement.past_until,
            window=policy.visible_window,
            scale=scale,
        )
    live = jnp.where(chunk.valid, placement.live, 0).sum(1, dtype=jnp.int32)
    lengths = placement.lengths
    cache = _remember(policy, cache, q, chunk)
    if policy.shrinks:
        assert chunk.ends_prompt is not None
        rows = functools.partial(_rows, cache.pool, chunk.page_table, lengths, q.dtype)
        state = policy.observe_prompt(cache.state, q, rows, chunk, scale)
        cache = dataclasses.replace(cache, state=state)
        cache, lengths = _shrink(
            policy, cache, q, chunk, lengths, chunk.ends_prompt, scale=scale, head_axis=head_axis
        )
    return Attended(out=out, cache=cache, lengths=lengths, live=live, reads=live)


def _remember(policy: Policy, cache: LayerCache, q: Array, chunk: Chunk) -> LayerCache:
    if not policy.remembers:
        return cache
    return dataclasses.replace(cache, state=policy.remember(cache.state, q, chunk))


def _rows(pool: Pool, page_table: Array, lengths: Array, dtype: Any) -> Rows:
    """What a layer's rows hold, gathered."""
    k_pages, v_pages, page_table = pool.readable(page_table, dtype)
    return Rows(
        k=load(k_pages, page_table, lengths),
        v=load(v_pages, page_table, lengths),
        lengths=lengths,
    )


def _shrink(
    policy: Policy,
    cache: LayerCache,
    q: Array,
    chunk: Chunk,
    lengths: Int[Array, "B K"],
    which: Bool[Array, " B"],
    *,
    scale: float,
    head_axis: str | None,
) -> tuple[LayerCache, Int[Array, "B K"]]:
    """Cuts the rows of some sequences to what the policy keeps.

    A loop of one round or none: where no sequence is due nothing is computed, and unlike the
    branches of a conditional a loop updates the pool in place.
    """

    def cut(carry):
        pool, pages, lengths, _ = carry
        state = PolicyState(rows=cache.state.rows, pages=pages)
        rows = _rows(pool, chunk.page_table, lengths, q.dtype)
        keep = policy.survivors(state, q, rows, chunk, scale, head_axis)
        keep = rows.live & (keep | ~which[:, None, None])
        (pool, pages), lengths = compact((pool, pages), chunk.page_table, keep)
        return pool, pages, lengths, jnp.zeros_like(which.any())

    with jax.named_scope("shrink"):
        pool, pages, lengths, _ = jax.lax.while_loop(
            lambda carry: carry[-1],
            cut,
            (cache.pool, cache.state.pages, lengths, which.any()),
        )
    state = dataclasses.replace(cache.state, pages=pages)
    return LayerCache(pool=pool, state=state), lengths


def _step(policy, cache, q, chunk, cos, sin, *, scale, host, head_axis) -> Attended:
    """One token of every sequence."""
    batch, _, num_heads, head_dim = q.shape
    cache, chunk, placement = _write(policy, cache, q, chunk, cos, sin, host)
    reading = policy.read(cache.state, q[:, 0], chunk, placement)
    num_rows = reading.lengths.size
    active = chunk.count > 0
    # An idle lane reads nothing, and attention to nothing is zero.
    lengths = jnp.where(active[:, None], reading.lengths, 0)
    with jax.named_scope("decode_attention"):
        result: Any
        if policy.fetches is not None:
            result, reads = attend_to_fetched(
                policy,
                cache.pool,
                q[:, 0],
                reading.page_table,
                lengths,
                scale=scale,
                host=host,
                layer=chunk.layer,
            )
            reading = dataclasses.replace(reading, reads=reads)
        else:
            result = decode_attention(
                q.reshape(num_rows, -1, head_dim),
                cache.pool.k_pages,
                cache.pool.v_pages,
                reading.page_table.reshape(num_rows, -1),
                lengths.reshape(num_rows),
                scale=scale,
                return_lse=policy.observes,
                return_scores=policy.observes,
                k_scales=cache.pool.k_scales,
                v_scales=cache.pool.v_scales,
            )
    if policy.observes:
        out, lse, scores = result
        read = scores > -jnp.inf
        weights = jnp.exp(jnp.where(read, scores - lse[..., None], -jnp.inf)).reshape(
            *placement.lengths.shape, -1, scores.shape[-1]
        )
        state = policy.observe(cache.state, weights, chunk, placement, head_axis)
        cache = dataclasses.replace(cache, state=state)
    else:
        out = result
    cache = _remember(policy, cache, q, chunk)
    lengths = placement.lengths
    if (due := policy.due(lengths, chunk, head_axis)) is not None:
        # Rows are rewritten once they have been read: left to find that out for itself, the
        # compiler for GPUs copies the whole pool for one of the two.
        out, pool = jax.lax.optimization_barrier((out, cache.pool))
        cache = dataclasses.replace(cache, pool=pool)
        cache, lengths = _shrink(
            policy, cache, q, chunk, lengths, active & due, scale=scale, head_axis=head_axis
        )
    reads = reading.lengths.sum(-1, dtype=jnp.int32) if reading.reads is None else reading.reads
    return Attended(
        out=out.reshape(batch, 1, num_heads, head_dim),
        cache=cache,
        lengths=lengths,
        live=jnp.where(active, placement.lengths.sum(-1, dtype=jnp.int32), 0)[:, None],
        reads=jnp.where(active, reads, 0)[:, None],
    )


def _token_by_token(policy, cache, q, chunk, cos, sin, *, scale, host, head_axis) -> Attended:
    """The steps of a chunk in order, for policies that learn from each reading."""

    def step(carry, token):
        cache, lengths = carry
        index, q, k, v, (queries, future), decisions, position, cos, sin = token
        one = dataclasses.replace(
            chunk,
            k=k[:, None],
            v=v[:, None],
            queries=jax.tree.map(lambda x: x[:, None], queries),
            future=jax.tree.map(lambda x: x[:, None], future),
            decisions=jax.tree.map(lambda x: x[..., None], decisions),
            positions=position[:, None],
            count=(index < chunk.count).astype(chunk.count.dtype),
            lengths=lengths,
        )
        attended = _step(
            policy,
            cache,
            q[:, None],
            one,
            cos[:, None],
            sin[:, None],
            scale=scale,
            host=host,
            head_axis=head_axis,
        )
        return (attended.cache, attended.lengths), (
            attended.out[:, 0],
            attended.live[:, 0],
            attended.reads[:, 0],
        )

    def tokens_first(x, axis=1):
        return jnp.moveaxis(x, axis, 0)

    tokens = (
        jnp.arange(q.shape[1]),
        *(tokens_first(x) for x in (q, chunk.k, chunk.v)),
        jax.tree.map(tokens_first, (chunk.queries, chunk.future)),
        jax.tree.map(lambda x: tokens_first(x, 2), chunk.decisions),
        *(tokens_first(x) for x in (chunk.positions, cos, sin)),
    )
    (cache, lengths), (out, live, reads) = jax.lax.scan(step, (cache, chunk.lengths), tokens)
    return Attended(
        out=jnp.moveaxis(out, 0, 1),
        cache=cache,
        lengths=lengths,
        live=live.T,
        reads=reads.T,
    )
