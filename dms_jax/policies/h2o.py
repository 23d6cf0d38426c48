"""H2O (Zhang et al., arXiv 2306.14048): heavy hitters and the recent tokens.

Each KV head stores, for every token in its cache, the sum of the attention weights that the token
has received from all queries since it was written, including its own:

    s_j = sum over queries i >= j of  mean over the group of softmax(q_i K)_j

With grouped queries the weight of a query is the mean over the group (the paper has one head per
group; a mean gives the same ranking as a sum). Over queries it is a sum, not a mean, which favours
old tokens, as published. Half of the budget goes to the most recent tokens and half to those with
the largest sums; beyond the budget, each query evicts the non-recent token with the smallest sum.

If a chunk of a prompt attends in one pass, `pallas_kernels.received_attention` recomputes the
scores for the sums, in memory linear in the prompt.
"""

import dataclasses
from typing import no_type_check

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from dms_jax.policies.slots import put_slots, slot_values
from dms_jax.policies.values import PAGES, CacheShape, Chunk, Placement, PolicyState
from dms_jax.policies.victims import VictimEviction
from pallas_kernels.received import NEVER, received_attention


@no_type_check  # jax also builds it from shapes and from partitions
@struct.dataclass
class Received:
    """Accumulated attention weight and position of the token in each slot."""

    sums: Float[Array, "N P"] = struct.field(metadata=PAGES)
    positions: Int[Array, "N P"] = struct.field(metadata=PAGES)


@dataclasses.dataclass(frozen=True)
class H2O(VictimEviction):
    """Keeps half the budget by accumulated attention, half by recency.

    Attributes:
      budget, compression_ratio, prefill: see `VictimEviction`; if the budget is odd, the recent
        tokens get the larger half.
    """

    def init_state(self, shape: CacheShape) -> PolicyState:
        """Returns the state of `VictimEviction`, and zero sums and positions."""
        pages = Received(
            sums=jnp.zeros(shape.pages, shape.wide), positions=jnp.zeros(shape.pages, jnp.int32)
        )
        return dataclasses.replace(super().init_state(shape), pages=pages)

    def written(self, state: PolicyState, chunk: Chunk, placement: Placement, pool) -> PolicyState:
        """Resets the sums of the slots that were written, and stores the positions."""
        received: Received = state.pages
        positions = jnp.broadcast_to(chunk.tokens.positions[:, None], placement.slots.shape)
        received = Received(
            sums=put_slots(received.sums, chunk.page_table, placement.slots, 0),
            positions=put_slots(received.positions, chunk.page_table, placement.slots, positions),
        )
        return dataclasses.replace(state, pages=received)

    def observe(self, state: PolicyState, chunk: Chunk, placement, seen) -> PolicyState:
        """Adds the weights of one query, or of all queries of a one-pass chunk."""
        if seen.weights is None:
            return _add(state, self._received_from(state, chunk, seen.q, seen.rows()), chunk)
        state = _add(state, seen.weights.mean(2), chunk)
        return super().observe(state, chunk, placement, seen)

    def scores(self, state, chunk, weights) -> Float[Array, "B K S"]:
        """Returns the accumulated weights; recent tokens score +inf."""
        budget = self.budget_of(chunk)
        recent = budget - budget // 2
        positions = slot_values(state.pages.positions, chunk.page_table)
        is_recent = positions > (chunk.newest[:, None] - recent)[..., None]
        return jnp.where(is_recent, jnp.inf, slot_values(state.pages.sums, chunk.page_table))

    def _received_from(self, state: PolicyState, chunk: Chunk, q, held) -> Float[Array, "B K S"]:
        """Returns the weight that each slot receives from all queries of a chunk."""
        positions = slot_values(state.pages.positions, chunk.page_table)
        # Padded queries have position -1, at which no key is visible.
        at = jnp.where(chunk.valid[:, 0], chunk.tokens.positions, -1)
        since = jnp.where(held.live, positions, NEVER)
        return received_attention(q, held.k, at, since, scale=chunk.static.scale)


def _add(state: PolicyState, weights: Float[Array, "B K S"], chunk: Chunk) -> PolicyState:
    """Adds weights to the sums of a layer's rows."""
    received: Received = state.pages
    table = chunk.page_table
    rows = received.sums.at[table].get(mode="fill", fill_value=0)
    new = rows + weights.reshape(rows.shape).astype(rows.dtype)
    sums = received.sums.at[table].set(new, mode="drop")
    return dataclasses.replace(state, pages=dataclasses.replace(received, sums=sums))
