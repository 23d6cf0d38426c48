"""A policy that records the tokens held and read by another policy, without other effects.

Each token's position is stored in its slot, beside its key: `Recording` carries an array [N, P] of
positions with the pages, which is written and moved together with the keys. So it reflects the real
cache, without knowledge of the policy.

Chunks have one token. After each, the row state has the tokens that the query saw and, for policies
that read less than they hold, the number of query heads that read each token's value.
"""

import dataclasses
from typing import Any, no_type_check

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dms_jax.checks import Count
from dms_jax.policies.base import LayerGroup, Policy
from dms_jax.policies.slots import put_slots, slot_values
from dms_jax.policies.values import (
    PAGES,
    ROWS,
    CacheShape,
    Chunk,
    Observation,
    Placement,
    PolicyState,
    Reading,
)


@no_type_check  # jax also builds it from shapes and from partitions
@struct.dataclass
class RecordedRows:
    """Row state of a recorded policy.

    Attributes:
      inner: row state of the recorded policy.
      seen: tokens that the latest query saw, by position.
      readers: number of query heads that read each token's value; None if they read everything.
    """

    inner: Any = struct.field(metadata=ROWS)
    seen: Bool[Array, "B K T"] = struct.field(metadata=ROWS)
    readers: Int[Array, "B K T"] | None = struct.field(metadata=ROWS)


@no_type_check  # jax also builds it from shapes and from partitions
@struct.dataclass
class RecordedPages:
    """Page state: the recorded policy's, and the position of the token in each slot."""

    inner: Any = struct.field(metadata=PAGES)
    positions: Int[Array, "N P"] = struct.field(metadata=PAGES)


def selects(policy: Policy) -> bool:
    """Returns whether a policy reads less than the cache holds."""
    return type(policy).read is not Policy.read


@dataclasses.dataclass(frozen=True)
class Recording(Policy):
    """Runs a policy and records its rows.

    Attributes:
      policy: the policy to run.
      tokens: length of the sequences (T).
      selects: whether reads are recorded; all layers agree, although some may read everything.
    """

    policy: Policy
    tokens: Count
    selects: bool

    # -- what the library must know ---------------------------------------------------------------

    @property
    def observes_weights(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """See `Policy.observes_weights`."""
        return self.policy.observes_weights

    @property
    def parallel(self):
        """See `Policy.parallel`."""
        return self.policy.parallel

    @property
    def visible_window(self) -> int:
        """See `Policy.visible_window`."""
        return self.policy.visible_window

    @property
    def shrinks(self) -> bool:
        """See `Policy.shrinks`."""
        return self.policy.shrinks

    @property
    def retrofit(self):
        """See `Policy.retrofit`."""
        return self.policy.retrofit

    def groups(self, num_layers: int) -> tuple[LayerGroup, ...]:
        """See `Policy.groups`; records each group's policy, with all values on the device."""
        return tuple(
            LayerGroup(group.start, group.end, dataclasses.replace(self, policy=group.policy))
            for group in self.policy.groups(num_layers)
        )

    def for_length(self, tokens: int) -> Policy:
        """See `Policy.for_length`."""
        policy = self.policy.for_length(tokens)
        return self if policy is self.policy else dataclasses.replace(self, policy=policy)

    def footprint(self, tokens, **options):
        """See `Policy.footprint`."""
        return self.policy.footprint(tokens, **options)

    # -- handed to the policy ---------------------------------------------------------------------

    def decide(self, tokens):
        """See `Policy.decide`."""
        return self.policy.decide(tokens)

    def borrowed(self, group: int, head_dim: int):
        """The neurons that the recorded policy borrows; see `Policy.borrowed`."""
        return self.policy.borrowed(group, head_dim)

    def evicted(self, chunk: Chunk):
        """See `Policy.evicted`."""
        return self.policy.evicted(chunk)

    def due(self, state: PolicyState, lengths, chunk: Chunk):
        """See `Policy.due`."""
        return self.policy.due(_inner(state), lengths, chunk)

    def merge(self, state: PolicyState, chunk: Chunk):
        """See `Policy.merge`."""
        inner, chunk = self.policy.merge(_inner(state), chunk)
        return _outer(state, inner), chunk

    def write(self, state: PolicyState, chunk: Chunk):
        """See `Policy.write`."""
        inner, placement = self.policy.write(_inner(state), chunk)
        return _outer(state, inner), placement

    def read(self, state: PolicyState, q, chunk: Chunk, placement: Placement) -> Reading:
        """See `Policy.read`."""
        return self.policy.read(_inner(state), q, chunk, placement)

    def survivors(self, state: PolicyState, chunk: Chunk, rows, q):
        """See `Policy.survivors`."""
        return self.policy.survivors(_inner(state), chunk, rows, q)

    # -- recorded ---------------------------------------------------------------------------------

    def init_state(self, shape: CacheShape) -> PolicyState:
        """Returns the policy's state, with no token seen."""
        inner = self.policy.init_state(shape)
        size = (*shape.rows, self.tokens)
        return PolicyState(
            rows=RecordedRows(
                inner=inner.rows,
                seen=jnp.zeros(size, bool),
                readers=jnp.zeros(size, jnp.int32) if self.selects else None,
            ),
            pages=RecordedPages(inner=inner.pages, positions=jnp.zeros(shape.pages, jnp.int32)),
        )

    def written(self, state: PolicyState, chunk: Chunk, placement: Placement, pool) -> PolicyState:
        """Records the position of the new token, and the tokens that its query will see."""
        state = _outer(state, self.policy.written(_inner(state), chunk, placement, pool))
        new = chunk.tokens.positions[:, None, :]
        positions = put_slots(state.pages.positions, chunk.page_table, placement.slots, new)
        held = slot_values(positions, chunk.page_table)
        used = jnp.arange(held.shape[-1]) < placement.lengths[..., None]
        seen = _count(held, used.astype(jnp.int32), self.tokens) > 0
        active = (chunk.count > 0)[:, None, None]
        return PolicyState(
            rows=dataclasses.replace(state.rows, seen=jnp.where(active, seen, state.rows.seen)),
            pages=dataclasses.replace(state.pages, positions=positions),
        )

    def observe(
        self, state: PolicyState, chunk: Chunk, placement: Placement, seen: Observation
    ) -> PolicyState:
        """Records which values were read."""
        inner = _inner(state)
        new = _outer(state, self.policy.observe(inner, chunk, placement, seen))
        if not self.selects:
            return new
        query = seen.q[:, 0]
        reading = self.policy.read(inner, query, chunk, placement)
        slots = slot_values(state.pages.positions, reading.page_table)  # [B, X, S]
        live = jnp.arange(slots.shape[-1]) < reading.lengths[..., None]
        batch, num_kv_heads = placement.lengths.shape
        group = query.shape[1] // num_kv_heads
        if reading.fetch is not None:
            slots = jnp.repeat(slots, group, axis=1)
            live = _fetched(reading, query, seen, chunk.static.scale)
        # Rows that a whole group shares count for each of its query heads.
        readers = live.astype(jnp.int32) * (batch * num_kv_heads * group // live[..., 0].size)
        by_row = (batch, num_kv_heads, -1)
        count = _count(slots.reshape(by_row), readers.reshape(by_row), self.tokens)
        return dataclasses.replace(new, rows=dataclasses.replace(new.rows, readers=count))


def _inner(state: PolicyState) -> PolicyState:
    return PolicyState(rows=state.rows.inner, pages=state.pages.inner)


def _outer(state: PolicyState, inner: PolicyState) -> PolicyState:
    return PolicyState(
        rows=dataclasses.replace(state.rows, inner=inner.rows),
        pages=dataclasses.replace(state.pages, inner=inner.pages),
    )


def _count(
    positions: Int[Array, "B K S"], weights: Int[Array, "B K S"], tokens: int
) -> Int[Array, "B K T"]:
    """Returns the sum of the weights of the slots of each position."""
    batch, heads, _ = positions.shape
    rows = jnp.arange(batch)[:, None, None], jnp.arange(heads)[None, :, None]
    positions = jnp.where(weights > 0, positions, tokens)  # out of range: dropped
    return (
        jnp.zeros((batch, heads, tokens), jnp.int32)
        .at[(*rows, positions)]
        .add(weights, mode="drop")
    )


def _fetched(
    reading: Reading, q: Float[Array, "B H D"], seen: Observation, scale: float
) -> Bool[Array, "B H S"]:
    """Returns the values that each query head fetches: those with the largest scores."""
    fetch, rows = reading.fetch, seen.rows()
    assert fetch is not None
    batch, num_kv_heads, num_slots, _ = rows.k.shape
    wide = jnp.promote_types(q.dtype, jnp.float32)
    grouped = q.reshape(batch, num_kv_heads, -1, q.shape[-1]).astype(wide)
    scores = scale * jnp.einsum("BKGD,BKSD->BKGS", grouped, rows.k.astype(wide))
    live = jnp.broadcast_to(rows.live[:, :, None], scores.shape)
    scores = jnp.where(live, scores, -jnp.inf)
    rank = jnp.argsort(jnp.argsort(-scores, axis=-1, stable=True), axis=-1)
    count = fetch.top if fetch.counts is None else fetch.counts[:, :, None, None]
    return (live & (rank < count)).reshape(batch, -1, num_slots)
