"""A policy that records the tokens held by another policy, without other effects.

Each token's position is stored in its slot, beside its key: `Recording` carries an array [N, P] of
positions with the pages, which is written and moved together with the keys. So it reflects the real
cache, without knowledge of the policy.

Chunks have one token. After each, the row state has the tokens that its query could see.
"""

import dataclasses
from typing import Any, no_type_check

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

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
      seen: tokens that the latest query could see, by position.
    """

    inner: Any = struct.field(metadata=ROWS)
    seen: Bool[Array, "B K T"] = struct.field(metadata=ROWS)


@no_type_check  # jax also builds it from shapes and from partitions
@struct.dataclass
class RecordedPages:
    """Page state: the recorded policy's, and the position of the token in each slot."""

    inner: Any = struct.field(metadata=PAGES)
    positions: Int[Array, "N P"] = struct.field(metadata=PAGES)


def _of_policy(name: str) -> Any:
    """An attribute or a method of the recorded policy."""
    return property(lambda recording: getattr(recording.policy, name))


@dataclasses.dataclass(frozen=True)
class Recording(Policy):
    """Runs a policy and records its rows.

    Attributes:
      policy: the policy to run.
      tokens: length of the sequences (T).
    """

    policy: Policy
    tokens: Count

    # What the library asks, and the recorded policy answers; none of it needs the state.
    observes_weights = _of_policy("observes_weights")
    parallel = _of_policy("parallel")
    visible_window = _of_policy("visible_window")
    shrinks = _of_policy("shrinks")
    retrofit = _of_policy("retrofit")
    footprint = _of_policy("footprint")
    decide = _of_policy("decide")
    borrowed = _of_policy("borrowed")
    evicted = _of_policy("evicted")

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

    def init_state(self, shape: CacheShape) -> PolicyState:
        """Returns the policy's state, with no token seen."""
        inner = self.policy.init_state(shape)
        size = (*shape.rows, self.tokens)
        return PolicyState(
            rows=RecordedRows(
                inner=inner.rows,
                seen=jnp.zeros(size, bool),
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
        batch, heads, _ = held.shape
        rows = jnp.arange(batch)[:, None, None], jnp.arange(heads)[None, :, None]
        places = jnp.where(used, held, self.tokens)  # unused ones are out of range: dropped
        seen = (
            jnp.zeros((batch, heads, self.tokens), bool).at[(*rows, places)].set(True, mode="drop")
        )
        active = (chunk.count > 0)[:, None, None]
        return PolicyState(
            rows=dataclasses.replace(state.rows, seen=jnp.where(active, seen, state.rows.seen)),
            pages=dataclasses.replace(state.pages, positions=positions),
        )

    def observe(
        self, state: PolicyState, chunk: Chunk, placement: Placement, seen: Observation
    ) -> PolicyState:
        """See `Policy.observe`."""
        return _outer(state, self.policy.observe(_inner(state), chunk, placement, seen))


def _inner(state: PolicyState) -> PolicyState:
    return PolicyState(rows=state.rows.inner, pages=state.pages.inner)


def _outer(state: PolicyState, inner: PolicyState) -> PolicyState:
    return PolicyState(
        rows=dataclasses.replace(state.rows, inner=inner.rows),
        pages=dataclasses.replace(state.pages, inner=inner.pages),
    )
