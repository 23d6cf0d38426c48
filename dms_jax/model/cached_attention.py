"""Attention of one layer over the paged cache, from a token's projections to the output.

    decide -> | merge -> rotate -> write -> read -> observe -> cut

The steps after the bar run inside `shard_map`, either for a whole chunk in one pass or token by
token. The token of a step is rotated and written by one kernel.
"""

import dataclasses
import functools
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from dms_jax import sharding
from dms_jax.cache import Cache
from dms_jax.cache.host_values import HostRows
from dms_jax.cache.pool import Pool
from dms_jax.model.attention import rotate
from dms_jax.model.cutting import LayerCache, cut_layer, gather_rows, split_heads
from dms_jax.model.fetching import attend_to_fetched, sinks_of_rows
from dms_jax.policies.base import Policy
from dms_jax.policies.values import Chunk, Observation, Placement, Tokens
from dms_jax.sharding import axes, cache_spec, partition
from pallas_kernels import DecodePlan, decode_attention, decode_plan, prefill_attention


@no_type_check  # jax also builds it from shapes and from partitions
@struct.dataclass
class Attended:
    """The result of attention over a chunk.

    `live` and `reads` are totals over the layer's KV heads, for each token of the chunk. After a
    step they are None if they equal the sums of `lengths`, which are computed for all layers at
    once.
    """

    out: Float[Array, "B T H D"] = struct.field(metadata=axes("sequences", "tokens", "heads"))
    cache: LayerCache
    lengths: Int[Array, "B K"] = struct.field(metadata=axes("sequences", "kv_heads"))
    live: Int[Array, "B T"] | None = struct.field(metadata=axes("sequences"))
    reads: Int[Array, "B T"] | None = struct.field(metadata=axes("sequences"))


def in_one_pass(policy: Policy, num_tokens: int, *, prompt: bool) -> bool:
    """Returns whether a compiled chunk of `num_tokens` attends in one pass, not token by token.

    Tokens before any eviction (`Policy.kept_whole`) always may. A chunk of one token is a decode
    step if prompts and answers are treated in the same way. A prompt with full attention (Quest)
    keeps it even in chunks of one token.
    """
    if policy.parallel == "always":
        return num_tokens > 1
    return prompt and policy.parallel == "prompts"


def plan_steps(cache: Cache, counts: Int[Array, " B"]) -> DecodePlan:
    """Returns the plan of one token's attention, for all layers at once.

    Evictions are known only inside a layer, so each row is planned with one slot more than it has.
    On a mesh each device plans its own rows, and the plans' arrays are concatenated.
    """
    num_layers, _, _, columns = cache.page_table.shape
    lengths = jnp.where(counts[:, None] > 0, cache.lengths + 1, 0)

    def plan(lengths: Int[Array, "L B K"]) -> DecodePlan:
        return decode_plan(
            lengths.reshape(num_layers, -1),
            columns=columns,
            page_size=cache.page_size,
            head_dim=cache.k_pages.shape[-1],
            dtype=cache.k_pages.dtype,
        )

    if not sharding.has_mesh():
        return plan(lengths)
    data, model = sharding.row_axes(*lengths.shape[1:])
    rows, side_by_side = (
        cache_spec(("layers", *names), data, model)
        for names in (("sequences", "kv_heads"), ("pages",))
    )
    return jax.shard_map(plan, in_specs=rows, out_specs=side_by_side, check_vma=False)(lengths)


def attend_cached(
    policy: Policy,
    cache: LayerCache,
    tokens: Tokens,
    chunk: Chunk,
    *,
    one_pass: bool,
    host: HostRows | None = None,
) -> Attended:
    """Runs a chunk of T tokens through one layer's cache, shard by shard.

    Args:
      policy: the layer's policy.
      cache: the pool and the layer's policy state.
      tokens: projections of the chunk's tokens in this layer.
      chunk: the other properties of the chunk; its own tokens and decisions are ignored.
      one_pass: whether all tokens attend in one pass, not one by one; see `in_one_pass`.
      host: the values in host memory, if this layer's are there; never on a mesh.
    """
    chunk = dataclasses.replace(
        chunk,
        tokens=dataclasses.replace(tokens, adapter_logits=None, late_logits=None),
        decisions=dataclasses.replace(policy.decide(tokens), logits=None),
    )
    attend = functools.partial(_attend, policy, one_pass=one_pass, host=host)
    if not sharding.has_mesh():
        return attend(cache, chunk)
    data, model = sharding.row_axes(*chunk.lengths.shape)
    plan, chunk = chunk.plan, dataclasses.replace(chunk, plan=None)
    result = jax.eval_shape(attend, cache, chunk)  # with all rows, which have no plan
    chunk = split_heads(chunk, model)
    specs = dataclasses.replace(
        partition(chunk, data, model), plan=cache_spec(("pages",), data, model)
    )
    mapped = jax.shard_map(
        attend,
        in_specs=(partition(cache, data, model), specs),
        out_specs=partition(result, data, model),
        check_vma=False,
    )
    return mapped(cache, dataclasses.replace(chunk, plan=plan))


def _attend(
    policy: Policy, cache: LayerCache, chunk: Chunk, *, one_pass: bool, host: HostRows | None
) -> Attended:
    head_axis = chunk.static.head_axis
    if one_pass:
        attended = _one_pass(policy, cache, chunk, host)
    elif chunk.valid.shape[-1] == 1:
        attended = _step(policy, cache, chunk, host)
    else:
        attended = _token_by_token(policy, cache, chunk, host)
    if head_axis is not None:
        live, reads = jax.lax.psum((attended.live, attended.reads), head_axis)
        attended = dataclasses.replace(attended, live=live, reads=reads)
    return attended


@dataclasses.dataclass(frozen=True)
class _Written:
    """A chunk written to the cache: rotated queries; keys and values exist only in the cache."""

    cache: LayerCache
    q: Float[Array, "B T H D"]
    placement: Placement


def _write(policy: Policy, cache: LayerCache, chunk: Chunk, host: HostRows | None) -> _Written:
    """Merges, places, rotates and stores the key and the value of a step's token."""
    with jax.named_scope("cache_write"):
        state, merged = policy.merge(cache.state, chunk)
        state, placement = policy.write(state, chunk)
        pool, tokens = cache.pool, merged.tokens
        if host is None and not pool.is_quantized:
            group = tokens.q.shape[2] // tokens.k.shape[2]
            pool, q = pool.rotate_and_store(
                chunk.page_table,
                placement.slots,
                tokens.q,
                tokens.k,
                tokens.v,
                merged.rotation,
                zeroed=policy.borrowed(group, tokens.k.shape[-1]),
            )
        else:
            q, k = rotate(policy, merged)
            pool = _store(pool, chunk, placement, _centered(k, chunk), tokens, host)
        state = policy.written(state, chunk, placement, pool)
    return _Written(LayerCache(pool=pool, state=state), q, placement)


def _centered(k: Float[Array, "B T K D"], chunk: Chunk) -> Float[Array, "B T K D"]:
    """Returns rotated keys as they are stored."""
    return k if chunk.key_center is None else (k - chunk.key_center).astype(k.dtype)


def _store(
    pool: Pool, chunk: Chunk, placement: Placement, k: Array, tokens: Tokens, host: HostRows | None
) -> Pool:
    """Stores keys and the values of a chunk."""
    on_host = None if host is None else (tokens.layer, tokens.positions)
    return pool.store(chunk.page_table, placement.slots, k, tokens.v, on_host=on_host)


def _observe(
    policy: Policy,
    written: _Written,
    chunk: Chunk,
    weights: Array | None = None,
    *,
    one_query: bool,
) -> LayerCache:
    """Updates the policy's state from the results of attention."""
    cache, placement, q = written.cache, written.placement, written.q
    given = chunk.page_table, placement.lengths, q.dtype, chunk.key_center
    rows = functools.partial(gather_rows, cache.pool, *given)
    seen = Observation(q=q, weights=weights, rows=rows, one_query=one_query)
    state = policy.observe(cache.state, chunk, placement, seen)
    return dataclasses.replace(cache, state=state)


def _one_pass(policy: Policy, cache: LayerCache, chunk: Chunk, host: HostRows | None) -> Attended:
    """Attends with all queries in one pass, over the earlier tokens and over the chunk."""
    chunk = dataclasses.replace(chunk, static=dataclasses.replace(chunk.static, one_pass=True))
    with jax.named_scope("cache_write"):
        state, merged = policy.merge(cache.state, chunk)
        state, placement = policy.write(state, chunk)
        q, k = rotate(policy, merged)
        k = _centered(k, chunk)
        stored_k, stored_v = (cache.pool.as_stored(x) for x in (k, merged.tokens.v))

    def attend(pool: Pool) -> Array:
        with jax.named_scope("prefill_attention"):
            k_pages, v_pages, page_table = pool.readable(chunk.page_table, q.dtype, host)
            return prefill_attention(
                q,
                stored_k,
                stored_v,
                placement.evicted,
                chunk.count,
                k_pages,
                v_pages,
                page_table,
                chunk.lengths,
                placement.past_until,
                window=policy.visible_window,
                scale=chunk.static.scale,
                sinks=None if chunk.sinks is None else chunk.sinks.reshape(-1),
                soft_cap=chunk.static.soft_cap,
            )

    def store(pool: Pool) -> Pool:
        with jax.named_scope("cache_write"):
            return _store(pool, chunk, placement, k, merged.tokens, host)

    # A prompt that will be cut is appended, so its earlier tokens are still in place, except the
    # last victim, whose slot the first token may take; it is masked. Other policies may reuse the
    # slots of tokens that the chunk still sees: they are read first.
    if policy.shrinks:
        pool = store(cache.pool)
        out = attend(pool)
    else:
        out, cache = _in_order(attend(cache.pool), cache)
        pool = store(cache.pool)
    state = policy.written(state, chunk, placement, pool)
    written = _Written(LayerCache(pool=pool, state=state), q, placement)
    live = jnp.where(chunk.valid, placement.live, 0).sum(1, dtype=jnp.int32)
    lengths = placement.lengths
    cache = _observe(policy, written, chunk, one_query=False)
    if policy.shrinks and chunk.ends_prompt is not None:
        out, cache = _in_order(out, cache)
        cache, lengths = cut_layer(
            policy, cache, chunk, lengths, chunk.ends_prompt, dtype=q.dtype, q=q
        )
    return Attended(out=out, cache=cache, lengths=lengths, live=live, reads=live)


def _step(policy: Policy, cache: LayerCache, chunk: Chunk, host: HostRows | None) -> Attended:
    """Attends with one token of every sequence. Rows are cut later: see `cutting`."""
    written = _write(policy, cache, chunk, host)
    cache, q, placement = written.cache, written.q, written.placement
    reading = policy.read(cache.state, q[:, 0], chunk, placement)
    active = chunk.count > 0
    # An idle lane reads nothing, and attention over no keys is zero.
    lengths = jnp.where(active[:, None], reading.lengths, 0)
    weights, reads = None, reading.reads
    with jax.named_scope("decode_attention"):
        if reading.fetch is not None:
            reading = dataclasses.replace(reading, lengths=lengths)
            out, reads = attend_to_fetched(cache.pool, q[:, 0], chunk, reading, host)
        else:
            result: Any = decode_attention(
                q.reshape(lengths.size, -1, q.shape[-1]),
                cache.pool.k_pages,
                cache.pool.v_pages,
                reading.page_table.reshape(lengths.size, -1),
                lengths.reshape(-1),
                scale=chunk.static.scale,
                sinks=sinks_of_rows(chunk, lengths.size),
                soft_cap=chunk.static.soft_cap,
                return_lse=policy.observes_weights,
                return_scores=policy.observes_weights,
                k_scales=cache.pool.k_scales,
                v_scales=cache.pool.v_scales,
                plan=chunk.plan if reading.lengths is placement.lengths else None,
            )
            if policy.observes_weights:
                out, lse, scores = result
                attended = scores > -jnp.inf
                weights = jnp.exp(jnp.where(attended, scores - lse[..., None], -jnp.inf))
                weights = weights.reshape(*placement.lengths.shape, -1, scores.shape[-1])
            else:
                out = result
            if reads is None and reading.lengths is not placement.lengths:
                reads = reading.lengths.sum(-1, dtype=jnp.int32)
    return Attended(
        out=out.reshape(q.shape),
        cache=_observe(policy, written, chunk, weights, one_query=True),
        lengths=placement.lengths,
        live=None,
        reads=None if reads is None else jnp.where(active, reads, 0)[:, None],
    )


def _in_order(out: Array, cache: LayerCache) -> tuple[Array, LayerCache]:
    """Orders attention's read of the cache before later writes; returns its output and the cache.

    Without an explicit order the GPU compiler copies the whole pool.
    """
    out, pool = jax.lax.optimization_barrier((out, cache.pool))
    return out, dataclasses.replace(cache, pool=pool)


def in_use(lengths: Int[Array, "*L B K"], count: Int[Array, " B"]) -> Int[Array, "B 1"]:
    """Returns the slots in use after a step, summed over a sequence's rows; 0 if it is idle."""
    rows = tuple(axis for axis in range(lengths.ndim) if axis != lengths.ndim - 2)
    return jnp.where(count > 0, lengths.sum(rows, dtype=jnp.int32), 0)[:, None]


def _token_by_token(
    policy: Policy, cache: LayerCache, chunk: Chunk, host: HostRows | None
) -> Attended:
    """Runs the tokens of a chunk in order, for policies that observe each query's attention."""

    def step(carry, xs):
        cache, lengths = carry
        index, tokens, decisions, rotation = xs
        one = dataclasses.replace(
            chunk,
            tokens=tokens,
            decisions=decisions,
            rotation=rotation,
            count=(index < chunk.count).astype(chunk.count.dtype),
            lengths=lengths,
        )
        attended = _step(policy, cache, one, host)
        cache, lengths = attended.cache, attended.lengths
        live = in_use(lengths, one.count)[:, 0]
        out, reads = attended.out, live if attended.reads is None else attended.reads[:, 0]
        if (due := policy.due(cache.state, lengths, one)) is not None:
            out, cache = _in_order(out, cache)
            due &= one.count > 0
            reads += jnp.where(due, lengths.sum(-1, dtype=jnp.int32), 0)  # read again for scoring
            cache, lengths = cut_layer(policy, cache, one, lengths, due, dtype=out.dtype)
        return (cache, lengths), (out[:, 0], live, reads)

    def one_by_one(x, axis):
        return jnp.moveaxis(jnp.expand_dims(x, axis + 1), axis, 0)

    tokens, num_tokens = chunk.tokens, chunk.valid.shape[-1]
    per_token = {
        name: one_by_one(getattr(tokens, name), 1) for name in ("q", "k", "v", "positions")
    }
    xs = (
        jnp.arange(num_tokens),
        dataclasses.replace(tokens, layer=jnp.broadcast_to(tokens.layer, num_tokens), **per_token),
        jax.tree.map(lambda x: one_by_one(x, 2), chunk.decisions),
        jax.tree.map(lambda x: one_by_one(x, 1), chunk.rotation),
    )
    (cache, lengths), (out, live, reads) = jax.lax.scan(step, (cache, chunk.lengths), xs)
    return Attended(
        out=jnp.moveaxis(out, 0, 1), cache=cache, lengths=lengths, live=live.T, reads=reads.T
    )
