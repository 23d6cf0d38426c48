"""The device side of generation: a cache with its page table, and the compiled chunks over it.

Nothing here scales with tokens on the host: pages are reserved before each chunk, a chunk of C
decode steps is one compiled program with a fixed trip count, and what comes back are the chunk's
tokens and the rows' lengths.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Float, Int, UInt32

from dms_jax import sharding
from dms_jax.cache import Cache, PageAllocator
from dms_jax.generation.sampling import Filter, sample
from dms_jax.model.caching import cache_specs, init_cache, page_bytes, state_bytes
from dms_jax.model.language_model import LanguageModel, use_mesh
from dms_jax.model.transformer import Transformer
from dms_jax.policies import Policy


@struct.dataclass
class Steps:
    """What C decode steps of B lanes return.

    Device arrays inside a program, NumPy arrays outside. `ran` says which steps each lane took; `live` and `reads` are totals over its L * K rows.
    """

    tokens: Any  # Int[C, B]
    logprobs: Any  # Float[C, B]
    ran: Any  # Bool[C, B]
    live: Any  # Int[C, B]
    reads: Any  # Int[C, B]


class Runner:
    """A cache of B lanes (places for sequences) and everything that runs over it.

    Attributes:
      lengths: Int[L, B, K] on the host, the slots in use per row after the last call.
      seen: Int[B] on the host, the tokens each lane has seen.
    """

    def __init__(
        self,
        model: LanguageModel,
        policy: Policy,
        *,
        num_lanes: int,
        num_pages: int,
        page_size: int,
    ):
        self.model, self.policy, self.page_size = model, policy, page_size
        self._shape = (num_lanes, num_pages)
        config = model.config
        self._page_bytes = page_bytes(config, policy, page_size, model.dtype)
        self._state_bytes = state_bytes(config, policy, model.dtype)
        self.restart()

    def restart(self) -> None:
        """Starts over with an empty cache."""
        num_lanes, num_pages = self._shape
        config, mesh = self.model.config, self.model.mesh
        with use_mesh(mesh):
            data, heads = sharding.row_axes(num_lanes, config.num_kv_heads)
            data_shards = sharding.axis_size(data) if data else 1
            head_shards = sharding.axis_size(heads) if heads else 1
            self._lanes_are_split = data_shards > 1
            pages_per_shard = num_pages // (data_shards * head_shards)
            make = functools.partial(
                init_cache,
                config,
                self.policy,
                num_sequences=num_lanes,
                num_pages=pages_per_shard * data_shards * head_shards,
                page_size=self.page_size,
                dtype=self.model.dtype,
            )
            shardings = None
            if mesh is not None:
                specs = cache_specs(jax.eval_shape(make), config.num_kv_heads)
                shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
            self.cache = jax.jit(make, out_shardings=shardings)()
        self.allocator = PageAllocator(
            num_layers=config.num_layers,
            num_sequences=num_lanes,
            num_kv_heads=config.num_kv_heads,
            pages_per_shard=pages_per_shard,
            page_size=self.page_size,
            sequence_shards=data_shards,
            head_shards=head_shards,
        )
        self.lengths = np.zeros((config.num_layers, num_lanes, config.num_kv_heads), np.int64)
        self.seen = np.zeros(num_lanes, np.int64)

    # -- memory -----------------------------------------------------------------------------------

    def slots_after(self, extra: Int[np.ndarray, " B"]) -> Int[np.ndarray, "L B K"]:
        """The most slots each row can need after `extra` more tokens per lane."""
        slots = self.lengths + np.asarray(extra)[None, :, None]
        limit = self.policy.slot_limit(self.page_size)
        return slots if limit is None else np.minimum(slots, np.maximum(limit, self.lengths))

    def fits(self, extra: Int[np.ndarray, " B"]) -> bool:
        """Whether the pool can hold `extra` more tokens per lane."""
        return self.allocator.fits(self.slots_after(extra))

    def reserve(self, extra: Int[np.ndarray, " B"]) -> None:
        """Reserves pages for `extra` more tokens per lane; CapacityError if they are not there."""
        self.allocator.reserve(self.slots_after(extra))

    def trim(self) -> None:
        """Gives back every page that no slot in use needs."""
        self.allocator.trim(self.lengths)

    def cache_bytes(self, lane: int) -> int:
        """Bytes of the pages reserved for a lane, and of the policy's state for it."""
        pages = int(self.allocator.reserved[:, lane].sum())
        return pages * self._page_bytes + self._state_bytes

    def clear(self, lanes: list[int]) -> None:
        """Empties lanes and gives their pages back."""
        self.allocator.release(np.asarray(lanes, np.int64))
        self.lengths[:, lanes] = 0
        self.seen[lanes] = 0
        mask = np.zeros(len(self.seen), bool)
        mask[lanes] = True
        with use_mesh(self.model.mesh):
            self.cache = _clear(self.cache, mask, self.model.config, self.policy)

    # -- running ----------------------------------------------------------------------------------

    def extend(
        self, tokens: dict[int, np.ndarray], *, width: int, prompt: bool
    ) -> tuple[dict[int, Array], dict[int, np.ndarray]]:
        """Runs the next tokens of some lanes through the cache (pages must be reserved).

        Args:
          tokens: lane -> up to `width` token ids.
          width: T of the compiled chunk.
          prompt: whether they belong to a prompt.

        Returns:
          lane -> hidden state [E] of its last token, and lane -> live slots after each token.
        """
        lanes = np.asarray(sorted(tokens), np.int32)
        num_lanes = len(self.seen)
        if self._lanes_are_split:
            slots = np.arange(num_lanes, dtype=np.int32)  # page numbers are local: lanes stay put
        else:
            size = min(_bucket(len(lanes)), num_lanes)
            slots = np.full(size, num_lanes, np.int32)  # out of range: nobody
            slots[: len(lanes)] = lanes
        batch = np.zeros((len(slots), width), np.int32)
        counts = np.zeros(len(slots), np.int32)
        for row, lane in enumerate(slots.tolist()):
            if lane in tokens:
                counts[row] = len(tokens[lane])
                batch[row, : counts[row]] = tokens[lane]
        table = self._table()
        rows = None if self._lanes_are_split else slots
        if rows is not None:
            table = table[:, np.minimum(slots, num_lanes - 1)]
        with use_mesh(self.model.mesh):
            self.cache, hidden, live = _extend(
                self.model.transformer, self.cache, table, rows, batch, counts, self.policy, prompt
            )
        self._sync()
        live = np.asarray(live)
        at = {lane: row for row, lane in enumerate(slots.tolist()) if lane in tokens}
        return (
            {lane: hidden[row] for lane, row in at.items()},
            {lane: live[row, : counts[row]] for lane, row in at.items()},
        )

    def first_tokens(
        self, hidden: dict[int, Array], keys: UInt32[np.ndarray, "B n"], rule: Filter
    ) -> tuple[dict[int, int], dict[int, float]]:
        """Draws the token after each lane's prompt from the prompt's last hidden state."""
        lanes = sorted(hidden)
        size = _bucket(len(lanes))
        index = np.asarray((lanes + lanes[:1] * size)[:size])
        stacked = jnp.stack([hidden[lane] for lane in index.tolist()])
        with use_mesh(self.model.mesh):
            tokens, logprobs = _sample_hidden(
                self.model.transformer, stacked, keys[index], self.seen[index], rule
            )
        tokens, logprobs = np.asarray(tokens), np.asarray(logprobs)
        return (
            {lane: int(tokens[i]) for i, lane in enumerate(lanes)},
            {lane: float(logprobs[i]) for i, lane in enumerate(lanes)},
        )

    def decode(
        self,
        tokens: Int[np.ndarray, " B"],
        remaining: Int[np.ndarray, " B"],
        keys: UInt32[np.ndarray, "B n"],
        rule: Filter,
        *,
        num_steps: int,
        end_tokens: tuple[int, ...],
    ) -> Steps:
        """Runs C decode steps in one program (pages must be reserved).

        Args:
          tokens: each lane's newest token, not in the cache yet.
          remaining: new tokens each lane may still draw; 0 for an idle lane.
          keys: [B], one per lane.
          rule: how to draw.
          num_steps: C.
          end_tokens: ids that end a lane.
        """
        with use_mesh(self.model.mesh):
            self.cache, steps = _decode(
                self.model.transformer,
                self.cache,
                self._table(),
                tokens.astype(np.int32),
                remaining.astype(np.int32),
                keys,
                self.policy,
                rule,
                num_steps,
                end_tokens,
            )
        self._sync()
        return jax.tree.map(np.asarray, steps)

    def follow(self, tokens: Int[np.ndarray, "n B"], counts: Int[np.ndarray, " B"]) -> Steps:
        """Runs C = n - 1 decode steps over given tokens; `logprobs[c]` is that of `tokens[c + 1]`.

        Lane b takes its first `counts[b]` steps.
        """
        with use_mesh(self.model.mesh):
            self.cache, steps = _follow(
                self.model.transformer,
                self.cache,
                self._table(),
                tokens.astype(np.int32),
                counts.astype(np.int32),
                self.policy,
            )
        self._sync()
        return jax.tree.map(np.asarray, steps)

    def _table(self) -> np.ndarray:
        widest = int(self.allocator.reserved.max(initial=1))
        return self.allocator.table_of_width(_bucket(widest))

    def _sync(self) -> None:
        self.lengths = np.asarray(self.cache.lengths).astype(np.int64)
        self.seen = np.asarray(self.cache.seen).astype(np.int64)
        held = self.allocator.reserved * self.page_size
        assert (self.lengths <= held).all(), "a row outgrew its reserve"


def _bucket(size: int) -> int:
    """The next power of two: few compiled shapes."""
    return 1 << max(size - 1, 0).bit_length()


@functools.partial(jax.jit, donate_argnums=0, static_argnums=(2, 3))
def _clear(cache: Cache, mask: Bool[Array, " B"], config: Any, policy: Policy) -> Cache:
    fresh = policy.init_rows(len(mask), config.num_kv_heads, config.head_dim, cache.k_pages.dtype)

    def reset(old, new):
        return jnp.where(mask.reshape(1, -1, *[1] * (old.ndim - 2)), new, old)

    return dataclasses.replace(
        cache,
        lengths=reset(cache.lengths, 0),
        seen=jnp.where(mask, 0, cache.seen),
        row_state=jax.tree.map(lambda old, new: reset(old, new[None]), cache.row_state, fresh),
    )


@functools.partial(jax.jit, donate_argnums=1, static_argnums=(6, 7))
def _extend(
    transformer: Transformer,
    cache: Cache,
    page_table: Int[Array, "L b K M"],
    lanes: Int[Array, " b"] | None,
    tokens: Int[Array, "b T"],
    counts: Int[Array, " b"],
    policy: Policy,
    prompt: bool,
) -> tuple[Cache, Float[Array, "b E"], Int[Array, "b T"]]:
    """Runs a chunk over some lanes (all of them if None) and puts their rows back."""

    def take(x):
        return x if lanes is None else x.at[:, lanes].get(mode="clip")

    def put(x, new):
        return new if lanes is None else x.at[:, lanes].set(new, mode="drop")

    some = dataclasses.replace(
        cache,
        page_table=page_table,
        lengths=take(cache.lengths),
        seen=take(cache.seen[None])[0],
        row_state=jax.tree.map(take, cache.row_state),
    )
    passed = transformer.cached(tokens, counts, some, policy, prompt=prompt)
    last = jnp.maximum(counts - 1, 0)[:, None, None]
    hidden = jnp.take_along_axis(passed.hidden, last, axis=1)[:, 0]
    after = passed.cache
    cache = dataclasses.replace(
        after,
        page_table=cache.page_table,
        lengths=put(cache.lengths, after.lengths),
        seen=put(cache.seen[None], after.seen[None])[0],
        row_state=jax.tree.map(put, cache.row_state, after.row_state),
    )
    return cache, hidden, passed.live


@functools.partial(jax.jit, static_argnums=4)
def _sample_hidden(
    transformer: Transformer, hidden: Array, keys: Array, positions: Array, rule: Filter
) -> tuple[Array, Array]:
    keys = jax.random.wrap_key_data(keys)
    return sample(transformer.unembed(hidden), keys, positions, rule)


@functools.partial(jax.jit, donate_argnums=1, static_argnums=(6, 7, 8, 9))
def _decode(
    transformer: Transformer,
    cache: Cache,
    page_table: Int[Array, "L B K M"],
    tokens: Int[Array, " B"],
    remaining: Int[Array, " B"],
    keys: UInt32[Array, "B n"],
    policy: Policy,
    rule: Filter,
    num_steps: int,
    end_tokens: tuple[int, ...],
) -> tuple[Cache, Steps]:
    request_keys = jax.random.wrap_key_data(keys)

    def step(carry, _):
        cache, tokens, remaining = carry
        active = remaining > 0
        passed = transformer.cached(
            tokens[:, None], active.astype(jnp.int32), cache, policy, prompt=False
        )
        with jax.named_scope("sample"):
            new, logprobs = sample(
                transformer.unembed(passed.hidden[:, 0]), request_keys, passed.cache.seen, rule
            )
        new = jnp.where(active, new, tokens)
        ended = functools.reduce(
            jnp.logical_or, [new == end for end in end_tokens], jnp.zeros_like(active)
        )
        remaining = jnp.where(ended, 0, remaining - active)
        out = Steps(
            tokens=new,
            logprobs=logprobs,
            ran=active,
            live=passed.live[:, 0],
            reads=passed.reads[:, 0],
        )
        return (passed.cache, new, remaining), out

    table_before = cache.page_table
    carry = (dataclasses.replace(cache, page_table=page_table), tokens, remaining)
    (cache, _, _), steps = jax.lax.scan(step, carry, length=num_steps)
    return dataclasses.replace(cache, page_table=table_before), steps


@functools.partial(jax.jit, donate_argnums=1, static_argnums=5)
def _follow(
    transformer: Transformer,
    cache: Cache,
    page_table: Int[Array, "L B K M"],
    tokens: Int[Array, "n B"],
    counts: Int[Array, " B"],
    policy: Policy,
) -> tuple[Cache, Steps]:
    def step(cache, xs):
        index, tokens, following = xs
        active = index < counts
        passed = transformer.cached(
            tokens[:, None], active.astype(jnp.int32), cache, policy, prompt=False
        )
        logits = transformer.unembed(passed.hidden[:, 0])
        chosen = jnp.take_along_axis(logits, following[:, None], axis=-1)[:, 0]
        out = Steps(
            tokens=following,
            logprobs=chosen - jax.nn.logsumexp(logits, axis=-1),
            ran=active,
            live=passed.live[:, 0],
            reads=passed.reads[:, 0],
        )
        return passed.cache, out

    table_before = cache.page_table
    cache, steps = jax.lax.scan(
        step,
        dataclasses.replace(cache, page_table=page_table),
        (jnp.arange(tokens.shape[0] - 1), tokens[:-1], tokens[1:]),
    )
    return dataclasses.replace(cache, page_table=table_before), steps
