"""The transformer of all families, over whole sequences or over the paged cache.

Layers are stacked and scanned by the shortest group of kinds that repeats (`layer_loop`), so that
compile time does not grow with depth. The pool is part of the scan's carry: it is updated in place
and never sliced by layer.
"""

import copy
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, struct
from jaxtyping import Array, Bool, Float, Int

from dms_jax import sharding
from dms_jax.cache import Cache
from dms_jax.cache.host_values import HostRows
from dms_jax.cache.pool import LaneAdapters
from dms_jax.config import LayerKind, ModelConfig
from dms_jax.model.attention import Attention, Relaxation, attend_sequences
from dms_jax.model.cached_attention import attend_cached, in_use, plan_steps
from dms_jax.model.cutting import LayerCache, cut_layers
from dms_jax.model.layer_loop import ByCache, Stretch, roles, scan_layers, stretches
from dms_jax.model.layers import (
    MLP,
    Adapter,
    ExpertMLP,
    RMSNorm,
    Routed,
    Stack,
    look_up,
    product,
)
from dms_jax.model.rematerialisation import KEPT, Remat
from dms_jax.model.rope import (
    apply_rope,
    mean_rotation,
    rope_frequencies,
    rope_tables,
    segment_positions,
)
from dms_jax.model.split_rows import Share, of_own_tokens
from dms_jax.model.supervision import Supervision, supervise
from dms_jax.model.unpadded import Unpadded
from dms_jax.policies.base import Policy, check_adapter
from dms_jax.policies.values import AdapterShape, Chunk, Decisions, PolicyState, Static, Tokens

# The first positions, over which the keys of an 8-bit cache are centred.
CENTERED = 8192


class Layer(nnx.Module):
    """One layer: attention, feed-forward, and an adapter if the policy needs one.

    Attention and feed-forward have a norm before, after, or both (`ModelConfig.norms`).
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        adapter: AdapterShape | None,
        stack: Stack,
        dtype: Any,
        rngs: nnx.Rngs,
    ):
        options: dict[str, Any] = dict(stack=stack, dtype=dtype)

        def norm(*where: str) -> RMSNorm | None:
            if config.norms not in where:
                return None
            embed = {"embed": config.hidden_size}
            return RMSNorm(embed, config.rms_norm_eps, offset=config.norm_offset, **options)

        self.attention_norm = norm("pre", "both")
        self.attention = Attention(config, rngs=rngs, **options)
        self.attention_post_norm = norm("post", "both")
        self.adapter = None if adapter is None else Adapter(config, adapter, rngs=rngs, **options)
        self.mlp_norm = norm("pre", "both")
        self.mlp = (MLP if config.experts is None else ExpertMLP)(config, rngs=rngs, **options)
        self.mlp_post_norm = norm("post", "both")

    def inputs(self, x: Float[Array, "B T E"]) -> Float[Array, "B T E"]:
        """Returns the input of attention's projections for a residual stream."""
        return x if self.attention_norm is None else self.attention_norm(x)

    def projections(
        self,
        x: Float[Array, "B T E"],
        policy: Policy,
        positions: Array,
        index: Array,
        own: LaneAdapters | None = None,
    ) -> Tokens:
        """Returns the layer's tokens as a policy sees them: projections and adapter logits.

        `own` [B, T, ...] chooses each token's adapter if the model has several.
        """
        logits = late = None
        if policy.retrofit.adapter:
            check_adapter(policy, None if self.adapter is None else self.adapter.shape)
            assert self.adapter is not None
            head: Any = self.adapter
            logits, late = head(x) if own is None else head(x, own.slots)
        q, k, v = self.attention.project(self.inputs(x), None if own is None else own.scales)
        return Tokens(
            q=q,
            k=k,
            v=v,
            adapter_logits=logits,
            late_logits=late,
            positions=positions,
            layer=index,
        )

    def finish(
        self,
        x: Float[Array, "B T E"],
        attended: Float[Array, "B T H D"],
        own: LaneAdapters | None = None,
    ) -> Array:
        """Applies the output projection, the feed-forward and both residual connections."""
        x = self._add_attention(x, attended, own)
        y = self.mlp(x if self.mlp_norm is None else self.mlp_norm(x))
        x = x + (y if self.mlp_post_norm is None else self.mlp_post_norm(y))
        return sharding.constrain(x, sharding.DATA, None, None)

    def routed(
        self, x: Float[Array, "B T E"], attended: Float[Array, "B T H D"], counted: Array
    ) -> Routed | None:
        """Returns the load statistics of the layer's router; None without experts."""
        if not isinstance(self.mlp, ExpertMLP):
            return None
        x = self._add_attention(x, attended)
        x = x if self.mlp_norm is None else self.mlp_norm(x)
        return self.mlp.routed(jax.lax.stop_gradient(x), counted)

    def _add_attention(
        self,
        x: Float[Array, "B T E"],
        attended: Float[Array, "B T H D"],
        own: LaneAdapters | None = None,
    ) -> Array:
        y = self.attention.output(attended.astype(x.dtype), None if own is None else own.scales)
        return x + (y if self.attention_post_norm is None else self.attention_post_norm(y))

    @property
    def sinks(self) -> Float[Array, "K G"] | None:
        """The layer's sinks, if it has any."""
        return None if self.attention.sinks is None else self.attention.sinks[...]


@struct.dataclass
class SequencePass:
    """The result of a pass over whole sequences.

    Attributes:
      hidden: hidden states after the final norm.
      decisions: hard decisions of every layer without a window (straight-through under a
        relaxation); if all layers have windows, one layer of empty decisions.
      supervision: predictions and targets of these layers, under a supervised relaxation.
      routed: load statistics of all layers' routers over tokens outside padding; None without
        experts.
    """

    hidden: Float[Array, "B T E"]
    decisions: Float[Array, "layers B K S"]
    supervision: Supervision | None = None
    routed: Routed | None = None


@struct.dataclass
class CachedPass:
    """The result of a pass of one chunk over the cache.

    `hidden` are the hidden states of [B, T] tokens, or of N places in line (`Unpadded`). `live` and
    `reads` are totals over all L * K rows of a sequence, after each token.
    """

    hidden: Float[Array, "rows tokens E"]
    cache: Cache
    live: Int[Array, "B T"]
    reads: Int[Array, "B T"]


class Transformer(nnx.Module):
    """The parameters and pure calls of a decoder-only transformer.

    Args:
      config: the model's configuration.
      adapter: the shape of each layer's decision adapter; True for the one that DMS reads.
      dtype: floating-point type of the parameters.
      rngs: random streams for initialization.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        adapter: AdapterShape | bool | None = None,
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.config = config
        if isinstance(adapter, bool):
            adapter = AdapterShape() if adapter else None
        self.embedding = nnx.Param(
            0.02 * jax.random.normal(rngs.params(), (config.vocab_size, config.hidden_size), dtype),
            axes=("vocab", "embed"),
        )
        self.layers = Layer(
            config, adapter=adapter, stack=(config.num_layers,), dtype=dtype, rngs=rngs
        )
        self.final_norm = RMSNorm(
            {"embed": config.hidden_size},
            config.rms_norm_eps,
            offset=config.norm_offset,
            dtype=dtype,
        )
        self.lm_head = (
            None
            if config.tie_embeddings
            else nnx.Param(
                0.02
                * jax.random.normal(rngs.params(), (config.hidden_size, config.vocab_size), dtype),
                axes=("embed", "vocab"),
            )
        )

    @property
    def has_adapter(self) -> bool:
        """Whether the layers have decision adapters."""
        return self.layers.adapter is not None

    @property
    def adapter_shape(self) -> AdapterShape | None:
        """Shape of the layers' decision adapters; None if they have none."""
        adapter = self.layers.adapter
        return None if adapter is None else adapter.shape

    def without_layers(self) -> "Transformer":
        """Returns the module with its parameters before and after the layers, which are shared.

        It can `embed` and `unembed`. A program with fewer arguments is launched sooner.
        """
        rest: Any = copy.copy(self)
        rest.layers = None
        return rest

    def unembed(self, hidden: Float[Array, "*rows E"]) -> Float[Array, "*rows V"]:
        """Returns the logits, accumulated in at least float32."""
        wide = jnp.promote_types(hidden.dtype, jnp.float32)
        matrix = (self.embedding if self.lm_head is None else self.lm_head)[...]

        def multiply(hidden: jax.Array) -> jax.Array:
            axes = "...E,VE->...V" if self.lm_head is None else "...E,EV->...V"
            return jnp.einsum(
                axes, hidden, matrix.astype(hidden.dtype), preferred_element_type=wide
            )

        logits, cap = product(multiply, hidden), self.config.logit_soft_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    @property
    def output_matrix(self) -> Float[Array, "V E"]:
        """The matrix that turns hidden states into logits."""
        return self.embedding[...] if self.lm_head is None else self.lm_head[...].T

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T E"]:
        """Returns the embeddings of tokens."""
        x: Any = look_up(self.embedding[...], tokens, self.config.hidden_size)
        if self.config.scaled_embedding:
            x = x * jnp.asarray(math.sqrt(self.config.hidden_size), x.dtype)
        return sharding.constrain(x, sharding.DATA, None, None)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        policy: Policy,
        *,
        segment_ids: Int[Array, "B S"] | None = None,
        relaxation: Relaxation | None = None,
        marks: Bool[Array, "layers B K S"] | None = None,
        remat: Remat = "nothing",
        unroll: bool = False,
        share: Share = Share(),  # noqa: B008 (it is immutable)
    ) -> SequencePass:
        """Runs one pass over whole sequences, for policies that decide without attention.

        Args:
          tokens: token ids.
          policy: a policy that is parallel in prompts and answers.
          segment_ids: ids of the documents packed into each row (positions restart, and no document
            attends to another); padding is segment 0.
          relaxation: settings of the soft decisions of training; None for hard decisions.
          marks: recorded hard decisions to replay, of the layers without a window.
          remat: what the backward pass recomputes of each layer; see `Remat`.
          unroll: whether the loop over layers is unrolled, which avoids stacking the residuals of
            the backward pass: faster for small models, but compile time grows with depth.
          share: this device's part of the layers and tokens. `tokens` are its own; segment ids, and
            the decisions of the result, cover whole rows.
        """
        row, prepare = share.row, share.prepare
        whole = tokens if row is None else jnp.zeros((tokens.shape[0], row.length), tokens.dtype)
        whole_positions = segment_positions(whole, segment_ids)
        positions = of_own_tokens(row, whole_positions)
        x = self.embed(tokens)
        rotations = self._rotations(whole_positions, x.dtype)
        has_windows, numbers = self._own_layers()
        counted = jnp.ones(tokens.shape, bool)
        if segment_ids is not None:
            counted = of_own_tokens(row, segment_ids) > 0

        def layer_pass(x, layer, index, role, marks):
            layer = layer if prepare is None else prepare(layer)
            policy, static = role.policy, self._static(role.kind)
            rotation, own = rotations[role.kind.rope], None if role.windowed else relaxation
            tokens = _with_all_heads(layer.projections(x, policy, positions, numbers(index)))
            attended, decisions, decided = attend_sequences(
                policy,
                tokens,
                rotation,
                static,
                sinks=layer.sinks,
                segment_ids=segment_ids,
                relaxation=own,
                marks=marks,
                row=row,
            )
            supervision = None
            if own is not None and own.supervised:
                supervision = supervise(
                    policy,
                    decisions,
                    tokens,
                    rotation,
                    layer.inputs(x),
                    layer.attention.o_proj.matrix,
                    scale=static.scale,
                    segment_ids=segment_ids,
                )
            result = decided, supervision
            if has_windows:
                result = ByCache(growing=None if role.windowed else result)
            routed = layer.routed(x, attended, counted)
            return layer.finish(x, attended), (result, routed)

        def body(x, layer, index, role, marks):
            run = lambda x, layer, index, marks: layer_pass(x, layer, index, role, marks)  # noqa: E731
            if remat == "nothing" and prepare is None:
                return run(x, layer, index, marks)
            # The passes of a scan are two loops, which the compiler cannot merge.
            return jax.checkpoint(run, policy=KEPT[remat], prevent_cse=unroll)(
                x, layer, index, marks
            )

        x, (outputs, routed) = scan_layers(
            body,
            x,
            self.layers,
            self._stretches(policy),
            ByCache(growing=marks) if has_windows else marks,
            unroll=unroll,
            gradients=True,
        )
        if has_windows:
            outputs = outputs.growing
        if outputs is None:  # no layer has decisions
            shape = (1, x.shape[0], self.config.num_kv_heads, whole.shape[1])
            outputs = jnp.zeros(shape, jnp.promote_types(x.dtype, jnp.float32)), None
        decisions, supervision = outputs
        return SequencePass(self.final_norm(x), decisions, supervision, routed)

    def cached(
        self,
        tokens: Int[Array, "B T"],
        counts: Int[Array, " B"],
        cache: Cache,
        policy: Policy,
        *,
        one_pass: bool,
        ends_prompt: Bool[Array, " B"] | None = None,
        host: HostRows | None = None,
        block: int = 1,
        line: Unpadded | None = None,
    ) -> CachedPass:
        """Runs the next `counts[b]` tokens of each sequence through the cache.

        Args:
          tokens: the next tokens, padded on the right.
          counts: number of tokens per sequence; 0 leaves a sequence unchanged.
          cache: the cache, with pages reserved for the tokens.
          policy: the cache's policy.
          one_pass: whether the tokens attend in one pass, not one by one; see `in_one_pass`.
          ends_prompt: whether the chunk completes the prompt of each sequence; None if it completes
            none, or if the policy cuts no rows after it.
          host: values in host memory of the layers that fetch them; the pool then has a tail.
          block: the most layers in a turn of the loop; see `scan_layers`.
          line: the unpadded layout of the tokens, for everything but attention and the policy; None
            for [B, T]. It must have a place for each token.
        """
        positions = cache.seen[:, None] + jnp.arange(tokens.shape[1], dtype=cache.seen.dtype)
        x = self.embed(tokens if line is None else line.unpad(tokens))
        in_line = positions if line is None else line.unpad(positions)
        nothing = jnp.zeros((*tokens.shape, self.config.num_kv_heads, 0), x.dtype)
        rotations = self._rotations(positions, x.dtype)
        has_windows, numbers = self._own_layers()
        shared = Chunk(  # shared by all layers
            tokens=Tokens(nothing, nothing, nothing, positions, jnp.int32(0)),
            decisions=Decisions(),
            rotation=next(iter(rotations.values())),
            count=counts,
            page_table=cache.page_table[0],
            lengths=cache.lengths[0],
            max_lengths=cache.max_lengths,
            ends_prompt=ends_prompt,
            static=self._static(self.config.kinds[0], cache.page_size),
        )
        own_adapters = _expand_to_tokens(cache.adapters, tokens.shape[1], line)
        each = self._stretches(policy)
        by_itself = len({id(role) for stretch in each for role in stretch.group}) == 1

        def body(carry, layer, index, role, rows):
            x, pool, page_state = carry
            page_table, lengths, row_state, plan, center = rows
            projected = layer.projections(x, role.policy, in_line, numbers(index), own_adapters)
            own = dataclasses.replace(
                shared,
                page_table=page_table,
                lengths=lengths,
                plan=plan,
                rotation=rotations[role.kind.rope],
                sinks=layer.sinks,
                key_center=center,
                static=self._static(role.kind, cache.page_size),
            )
            attended = attend_cached(
                role.policy,
                LayerCache(pool, PolicyState(rows=row_state, pages=page_state)),
                projected if line is None else line.pad_tokens(projected, positions),
                own,
                one_pass=tokens.shape[1] > 1 if role.windowed else one_pass,
                host=host if role.group.host_values else None,
            )
            layer_cache = attended.cache
            out = attended.out if line is None else line.unpad(attended.out)
            x = layer.finish(x, out, own_adapters)
            carry = (x, layer_cache.pool, layer_cache.state.pages)
            row_state = layer_cache.state.rows
            if has_windows:
                row_state = (
                    ByCache(windowed=row_state) if role.windowed else ByCache(growing=row_state)
                )
            rows = (attended.lengths, row_state)
            totals = (attended.live, attended.reads)
            if not by_itself:  # some roles return totals and others do not
                totals = [in_use(rows[0], counts) if each is None else each for each in totals]
            return carry, (rows, *totals)

        carry = (x, cache.pool, cache.page_state)
        one_step = tokens.shape[1] == 1 and not one_pass
        plan = plan_steps(cache, counts) if one_step else None
        centers = self.key_centers() if cache.pool.is_quantized else None
        rows = (cache.page_table, cache.lengths, cache.row_state, plan, centers)
        # XLA copies a policy's per-slot state if two layers of a turn write it.
        if jax.tree.leaves(cache.page_state):
            block = 1
        carry, ((lengths, row_state), live, reads) = scan_layers(
            body, carry, self.layers, each, rows, block=block
        )
        x, pool, page_state = carry
        live, reads = (
            in_use(lengths, counts) if each is None else each.sum(0, dtype=jnp.int32)
            for each in (live, reads)
        )
        if one_step:
            state = PolicyState(rows=row_state, pages=page_state)
            pool, state, lengths, read_again = cut_layers(
                policy,
                pool,
                state,
                shared,
                cache.page_table,
                lengths,
                centers=centers,
                windowed=self.config.windowed,
                dtype=x.dtype,
            )
            page_state, reads = state.pages, reads + read_again[:, None]
        return CachedPass(
            hidden=self.final_norm(x),
            cache=dataclasses.replace(
                cache,
                pool=pool,
                lengths=lengths,
                seen=cache.seen + counts,
                row_state=row_state,
                page_state=page_state,
            ),
            live=live,
            reads=reads,
        )

    def key_centers(self) -> Float[Array, "L K D"] | None:
        """Returns what a cache in 8 bits subtracts from each layer's keys; None for nothing.

        A constant added to all keys of a head cancels in a softmax, but not beside sinks or in a
        soft cap. Nor are biases what remains of keys after a norm. Only planes that turn by less
        than a radian over all positions have a center: it would be far from other planes' keys.
        """
        config, bias = self.config, self.layers.attention.qkv_proj.bias
        if bias is None or config.qk_norm or config.sinks or config.attention_soft_cap is not None:
            return None
        turns = []
        for kind in config.kinds:
            frequencies, _ = rope_frequencies(kind.rope, config.head_dim)
            slow = frequencies * config.max_position_embeddings < 1
            turns.append(slow * mean_rotation(kind.rope, config.head_dim, CENTERED))
        keys = bias[..., -2, :]
        layers = np.arange(len(keys)) % len(turns)
        cos, sin = (jnp.asarray(np.stack(each)[layers]) for each in zip(*turns, strict=True))
        return apply_rope(keys.astype(jnp.promote_types(keys.dtype, jnp.float32)), cos, sin)

    def _static(self, kind: LayerKind, page_size: int = 1) -> Static:
        """Returns the static properties of every chunk of a layer."""
        frequencies, _ = rope_frequencies(kind.rope, self.config.head_dim)
        return Static(
            page_size=page_size,
            scale=self.config.score_scale,
            soft_cap=self.config.attention_soft_cap,
            num_layers=self.config.num_full_layers,
            frequencies=tuple(frequencies.tolist()),
        )

    def _rotations(self, positions: Int[Array, "B T"], dtype: Any) -> dict[Any, tuple]:
        """Returns cos and sin of the positions for every rotation in use."""
        ropes = dict.fromkeys(kind.rope for kind in self.config.kinds)
        return {
            rope: rope_tables(rope, self.config.head_dim, positions, dtype=dtype) for rope in ropes
        }

    def _stretches(self, policy: Policy) -> list[Stretch]:
        return stretches(roles(self.config, policy), len(self.config.kinds))

    def _own_layers(self) -> tuple[bool, Callable[[Array], Array]]:
        """Returns whether layers have windows, and each layer's index for the policy.

        A policy counts only the layers without a window.
        """
        windowed = self.config.windowed
        if not any(windowed):
            return False, lambda index: index
        before = np.cumsum(np.logical_not(windowed)) - np.logical_not(windowed)
        return True, lambda index: jnp.asarray(before, jnp.int32)[index]


def _with_all_heads(tokens: Tokens) -> Tokens:
    """Returns tokens whose adapter logits are on every device (see `sharding.TRAINING_RULES`)."""

    def everywhere(logits: Array | None) -> Array | None:
        return None if logits is None else sharding.constrain(logits, sharding.DATA, None, None)

    return dataclasses.replace(
        tokens,
        adapter_logits=everywhere(tokens.adapter_logits),
        late_logits=everywhere(tokens.late_logits),
    )


def _expand_to_tokens(
    lanes: LaneAdapters | None, num_tokens: int, line: Unpadded | None
) -> LaneAdapters | None:
    """Expands adapters of sequences to tokens, [B, T] or unpadded."""
    if lanes is None:
        return None

    def expand(x: Array) -> Array:
        x = jnp.broadcast_to(x[:, None], (len(x), num_tokens, *x.shape[1:]))
        return x if line is None else line.unpad(x)

    return jax.tree.map(expand, lanes)
