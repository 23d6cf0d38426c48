"""Attention of one layer: projections, decisions, rotation, and the pass over whole sequences.

    hidden -> q, k, v -> decide -> merge -> rotate (clear borrowed, rope, clear borrowed) -> attend

There are two forms of attention: over whole sequences without a cache (this file), with the hard
decisions of inference or the soft ones of training, and over the paged cache (`cached_attention`).
Both use `rotate`.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from dms_jax import sharding
from dms_jax.config import ModelConfig
from dms_jax.model.layers import Linear, RMSNorm, Stack, residual_gain, rms_norm
from dms_jax.model.rope import apply_rope
from dms_jax.model.split_rows import SplitRow, of_own_tokens, of_whole_rows
from dms_jax.policies.base import Policy
from dms_jax.policies.values import CacheShape, Chunk, Decisions, Static, Tokens
from pallas_kernels import retrofit_attention


class Attention(nnx.Module):
    """The projections of grouped-query attention, with optional biases, q/k norms and sinks.

    Queries, keys and values have one fused matrix [E, K, G + 2, D]: for each KV head its G query
    heads, its key and its value. This is one matrix product instead of three small ones, and it is
    sharded by KV head without reordering.
    """

    def __init__(self, config: ModelConfig, *, stack: Stack, dtype: Any, rngs: nnx.Rngs):
        embed = {"embed": config.hidden_size}
        queries = {"heads": config.num_heads, "head_dim": config.head_dim}
        groups = {
            "kv_heads": config.num_kv_heads,
            "group": config.group_size + 2,
            "head_dim": config.head_dim,
        }
        options: dict[str, Any] = dict(stack=stack, dtype=dtype, rngs=rngs)
        self.qkv_proj = Linear(embed, groups, bias=config.qkv_bias, **options)
        gain = residual_gain(config)
        self.o_proj = Linear(queries, embed, bias=config.output_bias, gain=gain, **options)
        over_q = over_k = {"head_dim": config.head_dim}
        if config.qk_norm_over == "heads":
            over_q = groups | {"group": config.group_size}
            over_k = {"kv_heads": config.num_kv_heads} | over_k

        def norm(over: dict[str, int]) -> RMSNorm | None:
            if not config.qk_norm:
                return None
            epsilon, offset = config.rms_norm_eps, config.norm_offset
            return RMSNorm(over, epsilon, stack=stack, offset=offset, dtype=dtype)

        self.q_norm, self.k_norm = norm(over_q), norm(over_k)
        axes = (*("layers",) * len(stack), "kv_heads", "group")
        shape = (*stack, config.num_kv_heads, config.group_size)
        self.sinks = nnx.Param(jnp.zeros(shape, dtype), axes=axes) if config.sinks else None

    def project(
        self, x: Float[Array, "B T E"], scales: Float[Array, "B T R"] | None = None
    ) -> tuple[Float[Array, "B T H D"], Float[Array, "B T K D"], Float[Array, "B T K D"]]:
        """Returns queries, keys and values before rotation.

        Args:
          x: the inputs.
          scales: scales of each token, if several adapters have low-rank updates
            (`model.adapters`).
        """
        grouped = self._normed(_product(self.qkv_proj, x, scales))
        q = grouped[..., :-2, :].reshape(*x.shape[:2], -1, grouped.shape[-1])
        return q, grouped[..., -2, :], grouped[..., -1, :]

    def output(
        self, x: Float[Array, "B T H D"], scales: Float[Array, "B T R"] | None = None
    ) -> Float[Array, "B T E"]:
        """Returns the output projection; see `project`."""
        return _product(self.o_proj, x, scales)

    def _normed(self, grouped: Float[Array, "B T K n D"]) -> Float[Array, "B T K n D"]:
        """Applies the norms of queries and keys, if there are any.

        Norms all heads in place, in one pass; values do not change. Splitting queries and keys
        first would cost a GPU two slices and two norms in every step.
        """
        if self.q_norm is None or self.k_norm is None:
            return grouped
        if self.q_norm.num_dims > 1:
            q, k, v = (grouped[..., part, :] for part in (slice(0, -2), -2, slice(-1, None)))
            return jnp.concatenate([self.q_norm(q), self.k_norm(k)[..., None, :], v], axis=-2)
        # Round as stored: XLA may skip the rounding between a low-rank sum and a norm.
        info = jnp.finfo(grouped.dtype)
        grouped = jax.lax.reduce_precision(grouped, info.nexp, info.nmant)
        head = jax.lax.broadcasted_iota(jnp.int32, grouped.shape[-2:], 0)
        group = grouped.shape[-2] - 2
        scale = jnp.where(head < group, self.q_norm.scale[...], self.k_norm.scale[...])
        normed = rms_norm(grouped, scale, self.q_norm.epsilon, offset=self.q_norm.offset)
        return jnp.where(head <= group, normed, grouped)


def _product(projection: Any, x: Array, scales: Array | None) -> Array:
    """Returns a projection; only projections with low-rank updates take scales."""
    return projection(x) if scales is None else projection(x, scales)


@dataclasses.dataclass(frozen=True)
class Relaxation:
    """Settings of the soft decisions of training.

    Attributes:
      noise_keys: random key of each sequence's logistic noise [B], from which every layer derives
        one; None for no noise.
      neuron_scale: factor on the borrowed neuron while it decays to zero before the retrofit,
        without evictions. None after that, when decisions take effect.
      supervised: whether decisions learn from attention, without evictions.
    """

    noise_keys: Any = None
    neuron_scale: Any = None
    supervised: bool = False


jax.tree_util.register_dataclass(
    Relaxation, data_fields=["noise_keys", "neuron_scale"], meta_fields=["supervised"]
)


def rotate(
    policy: Policy, chunk: Chunk, scale: Any = 0.0, row: SplitRow | None = None
) -> tuple[Float[Array, "B T H D"], Float[Array, "B S K D"]]:
    """Returns rotated queries and keys, with the borrowed neurons multiplied by `scale`.

    If rows are split over devices, queries are the shard's, and keys those of all shards.
    """
    q, k = policy.clear_borrowed(chunk.tokens.q, chunk.tokens.k, scale)
    q, k = apply_rope(q, *of_own_tokens(row, chunk.rotation)), apply_rope(k, *chunk.rotation)
    return policy.clear_borrowed(q, k, scale)


def attend_sequences(
    policy: Policy,
    tokens: Tokens,
    rotation: tuple[Float[Array, "B S half"], Float[Array, "B S half"]],
    static: Static,
    *,
    sinks: Float[Array, "K G"] | None,
    segment_ids: Int[Array, "B S"] | None,
    relaxation: Relaxation | None,
    marks: Bool[Array, "B K S"] | None,
    row: SplitRow | None = None,
) -> tuple[Float[Array, "B T H D"], Decisions, Float[Array, "B K S"]]:
    """Attends over whole sequences, for policies that decide without attention weights.

    Args:
      policy: a policy that is always parallel.
      tokens: all tokens of the sequences, or a shard's.
      rotation: cos and sin of the positions of all tokens.
      static: properties of the pass, of which only the scale and the soft cap are used.
      sinks: the layer's sink logit of each query head, which takes part in its softmax.
      segment_ids: ids of the documents packed into each sequence; None for one document.
      relaxation: settings of the soft decisions of training; None for hard decisions.
      marks: recorded hard decisions to replay in place of the policy's own.
      row: how the tokens are split over devices; None for whole rows.

    Returns:
      (output, the decisions, the decisions as numbers: straight-through under a relaxation). The
      decisions are those of all tokens.
    """
    tokens = _split_heads(tokens)
    decaying = relaxation is not None and relaxation.neuron_scale is not None
    scale_of_borrowed = relaxation.neuron_scale if relaxation is not None and decaying else 0.0
    decisions = policy.decide(tokens)
    if row is not None:  # queries stay in their shard
        k, v = of_whole_rows(row, (tokens.k, tokens.v))
        tokens = dataclasses.replace(
            tokens, k=k, v=v, positions=of_whole_rows(row, tokens.positions)
        )
        decisions = of_whole_rows(row, decisions, axis=2)
    if marks is not None:
        decisions = dataclasses.replace(decisions, marks=marks)
    batch, num_tokens, num_kv_heads, head_dim = tokens.k.shape
    chunk = Chunk(
        tokens=tokens,
        decisions=decisions,
        rotation=rotation,
        count=jnp.full((batch,), num_tokens, jnp.int32),
        page_table=jnp.zeros((batch, num_kv_heads, 0), jnp.int32),
        lengths=jnp.zeros((batch, num_kv_heads), jnp.int32),
        static=static,
    )
    shape = (batch, num_kv_heads, num_tokens)
    wide = jnp.promote_types(tokens.k.dtype, jnp.float32)
    supervised = relaxation is not None and relaxation.supervised
    if decaying:
        bias = numbers = jnp.zeros(shape, wide)
    elif supervised:
        bias, numbers = jnp.zeros(shape, wide), _as_numbers(decisions, shape, wide)
    elif relaxation is not None:
        noise = jnp.zeros(shape, wide)
        if relaxation.noise_keys is not None:
            # One draw per sequence, so the noise does not depend on splitting or batching.
            noise = jax.vmap(
                lambda key: jax.random.logistic(
                    jax.random.fold_in(key, tokens.layer), shape[1:], wide
                )
            )(relaxation.noise_keys)
        relaxed = policy.relax(chunk, noise)
        tokens = dataclasses.replace(tokens, k=relaxed.k, v=relaxed.v)
        chunk = dataclasses.replace(chunk, tokens=tokens)
        bias, numbers = relaxed.bias, relaxed.decisions
    else:
        empty = CacheShape(batch, num_kv_heads, head_dim, tokens.k.dtype)
        _, chunk = policy.merge(policy.init_state(empty), chunk)
        bias = jnp.where(policy.evicted(chunk), -jnp.inf, jnp.zeros((), wide))
        numbers = _as_numbers(decisions, shape, wide)
    q, k = rotate(policy, chunk, scale_of_borrowed, row)
    # Without decisions the window covers every key, so that no tile reads the bias.
    decided = decisions.marks is not None and not decaying and not supervised
    window = policy.visible_window if decided else num_tokens
    with jax.named_scope("attention"):
        out = _sharded_attention(
            q, k, chunk.tokens.v, bias, segment_ids, row, sinks, static, window=window
        )
    return out, decisions, numbers


def _as_numbers(decisions: Decisions, shape: tuple[int, ...], dtype: Any) -> Array:
    """Returns the hard decisions as numbers; zeros for a policy without decisions."""
    return jnp.zeros(shape, dtype) if decisions.marks is None else decisions.marks.astype(dtype)


def _sharded_attention(
    q, k, v, bias, segment_ids, row: SplitRow | None, sinks, static: Static, *, window: int
) -> Array:
    """Runs `retrofit_attention` per shard: sequences and KV heads are independent.

    In a split row each piece of queries attends from its position.
    """

    def attend(q, k, v, bias, ids, starts, sinks):
        options: dict[str, Any] = dict(
            window=window,
            scale=static.scale,
            segment_ids=ids,
            sinks=None if sinks is None else sinks.reshape(-1),
            soft_cap=static.soft_cap,
        )
        if not starts:
            return retrofit_attention(q, k, v, bias, **options)
        pieces = zip(jnp.split(q, len(starts), axis=1), starts, strict=True)
        out = [retrofit_attention(x, k, v, bias, start=start, **options) for x, start in pieces]
        return jnp.concatenate(out, axis=1)

    starts = () if row is None else row.starts
    if not sharding.has_mesh():
        return attend(q, k, v, bias, segment_ids, starts, sinks)
    if segment_ids is None:
        segment_ids = jnp.zeros(k.shape[:2], jnp.int32)
    repeats = _repeats(q.shape[2], k.shape[2])
    k, v, bias = jnp.repeat(k, repeats, 2), jnp.repeat(v, repeats, 2), jnp.repeat(bias, repeats, 1)
    if sinks is not None:
        sinks = sinks.reshape(k.shape[2], -1)
    data, model = sharding.row_axes(q.shape[0], k.shape[2])
    heads = PartitionSpec(data, None, model)
    mapped = jax.shard_map(
        attend,
        in_specs=(
            *(heads, heads, heads, PartitionSpec(data, model), PartitionSpec(data)),
            *(PartitionSpec(), PartitionSpec(model)),
        ),
        out_specs=heads,
        axis_names=sharding.free_axes(),
        check_vma=False,
    )
    return mapped(q, k, v, bias, segment_ids, starts, sinks)


def _split_heads(tokens: Tokens) -> Tokens:
    """Returns the tokens with query heads over `model`, if it does not divide the KV heads.

    Their projection is then split within the heads (`sharding.TRAINING_RULES`).
    """
    if tokens.k.shape[2] % sharding.axis_size(sharding.MODEL) == 0:
        return tokens
    q = sharding.constrain(tokens.q, sharding.DATA, None, sharding.MODEL, None)
    k, v = (sharding.constrain(x, sharding.DATA, None, None, None) for x in (tokens.k, tokens.v))
    return dataclasses.replace(tokens, q=q, k=k, v=v)


def _repeats(num_heads: int, num_kv_heads: int) -> int:
    """Returns the number of copies of each KV head, each for a part of its query heads.

    # 2 KV heads of 4 query heads, over 4 devices  Out: 2, so that each device has 2 query heads
    """
    devices = sharding.axis_size(sharding.MODEL)
    repeats = devices // math.gcd(devices, num_kv_heads)
    return repeats if (num_heads // num_kv_heads) % repeats == 0 else 1
