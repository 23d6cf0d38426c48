"""Attention of one layer over the paged cache: write, read, observe, and cut after a prompt.

The whole of it runs inside `shard_map`.
"""

import dataclasses
import functools
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from dms_jax import sharding
from dms_jax.cache.host_values import HostRows
from dms_jax.model.cutting import cut_layer, gather_rows
from dms_jax.model.fetching import attend_to_fetched
from dms_jax.model.layer_cache import LayerCache
from dms_jax.model.rope import apply_rope
from dms_jax.policies.base import Chunk, Placement, Policy
from dms_jax.sharding import axes, cache_spec, partition
from pallas_kernels import decode_attention, prefill_attention


@no_type_check  # jax also builds it of shapes and of partitions
@struct.dataclass
class Attended:
    """What attention over a chunk leaves behind.

    `live` and `reads` are totals over the layer's KV heads, for each token of the chunk.
    """

    out: Float[Array, "B T H D"] = struct.field(metadata=axes("sequences", "tokens", "heads"))
    cache: LayerCache
    lengths: Int[Array, "B K"] = struct.field(metadata=axes("sequences", "kv_heads"))
    live: Int[Array, "B T"] = struct.field(metadata=axes("sequences"))
    reads: Int[Array, "B T"] = struct.field(metadata=axes("sequences"))


def in_one_pass(policy: Policy, num_tokens: int, *, prompt: bool) -> bool:
    """Whether a compiled chunk of so many tokens attends in one pass, not token by token.

    A prompt that is read whole (Quest) stays so in chunks of one token.
    """
    return policy.parallel(prompt=prompt) and (num_tokens > 1 or not policy.parallel(prompt=False))


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
    heads = cache_spec(("sequences", "tokens", "heads"), data, model)
    angles = cache_spec(("sequences",), data, model)
    result = jax.eval_shape(functools.partial(attend, head_axis=None), *arguments)
    mapped = jax.shard_map(
        functools.partial(attend, head_axis=model),
        in_specs=(
            partition(cache, data, model),
            heads,
            partition(chunk, data, model),
            angles,
            angles,
        ),
        out_specs=partition(result, data, model),
        check_vma=False,
    )
    return mapped(*arguments)


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
    if in_one_pass(policy, num_tokens, prompt=prompt):
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
        rows = functools.partial(gather_rows, cache.pool, chunk.page_table, lengths, q.dtype)
        state = policy.observe_prompt(cache.state, q, rows, chunk, scale)
        cache = dataclasses.replace(cache, state=state)
        cache, lengths = cut_layer(
            policy,
            cache,
            q,
            chunk,
            lengths,
            chunk.ends_prompt,
            scale=scale,
            dtype=q.dtype,
            head_axis=head_axis,
        )
    return Attended(out=out, cache=cache, lengths=lengths, live=live, reads=live)


def _remember(policy: Policy, cache: LayerCache, q: Array, chunk: Chunk) -> LayerCache:
    if not policy.remembers:
        return cache
    return dataclasses.replace(cache, state=policy.remember(cache.state, q, chunk))


def _step(policy, cache, q, chunk, cos, sin, *, scale, host, head_axis) -> Attended:
    """One token of every sequence. Rows are not cut yet: see `cutting`."""
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
                reading.fetches,
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
    reads = reading.lengths.sum(-1, dtype=jnp.int32) if reading.reads is None else reading.reads
    return Attended(
        out=out.reshape(batch, 1, num_heads, head_dim),
        cache=cache,
        lengths=placement.lengths,
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
        cache, lengths = attended.cache, attended.lengths
        out, reads = attended.out, attended.reads[:, 0]
        if (due := policy.due(lengths, one, head_axis)) is not None:
            # Rows are rewritten once they have been read: left to find that out for itself, the
            # compiler for GPUs copies the whole pool for one of the two.
            out, pool = jax.lax.optimization_barrier((out, cache.pool))
            cache = dataclasses.replace(cache, pool=pool)
            due &= one.count > 0
            reads += jnp.where(due, lengths.sum(-1, dtype=jnp.int32), 0)  # again, to be judged
            cache, lengths = cut_layer(
                policy,
                cache,
                None,
                one,
                lengths,
                due,
                scale=scale,
                dtype=q.dtype,
                head_axis=head_axis,
            )
        return (cache, lengths), (
            out[:, 0],
            attended.live[:, 0],
            reads,
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
