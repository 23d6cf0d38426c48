"""H2O (Zhang et al., arXiv 2306.14048): heavy hitters and the recent tokens.

Each KV head stores, for every token in its cache, the sum of the attention weights that the token
has received from all queries since it was written, including its own:

    s_j = sum over queries i >= j of  mean over the group of softmax(q_i K)_j

With grouped queries the weight of a query is the mean over the group (the paper has one head per
group; a mean gives the same ranking as a sum). Over queries it is a sum, not a mean, so old tokens
are favoured, as published. Half of the budget goes to the most recent tokens and half to those
with the largest sums; beyond the budget, each query evicts the token with the smallest sum among
those that are not recent.

Where the queries of a prompt attend in one pass, their sums are computed chunk by chunk in a second
pass over the scores, in blocks of queries: memory is linear in the prompt.
"""

import dataclasses
from typing import no_type_check

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from dms_jax.policies.attention_weights import received_weights
from dms_jax.policies.slots import put_slots, slot_values
from dms_jax.policies.values import PAGES, CacheShape, Chunk, Placement, PolicyState
from dms_jax.policies.victims import VictimEviction

# Weights of a block of queries, over all sequences and heads: 256 MB in float32, or more for the
# fewest queries, since every block reads all keys.
MOST_WEIGHTS = 2**26
FEWEST = 16


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
        """Adds the weights of one query, or of all queries of a chunk in one pass."""
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
        batch, num_tokens, num_heads, head_dim = q.shape
        num_kv_heads = held.k.shape[1]
        a_query = batch * num_heads * positions.shape[-1]
        most = 1 << max(0, (MOST_WEIGHTS // a_query).bit_length() - 1)
        size = min(num_tokens, max(FEWEST, most))
        padding = -num_tokens % size
        # Padded queries have position -1, at which no key is visible.
        at = jnp.where(chunk.valid[:, 0], chunk.tokens.positions, -1)
        at = jnp.pad(at, ((0, 0), (0, padding)), constant_values=-1)
        grouped = jnp.pad(q, ((0, 0), (0, padding), (0, 0), (0, 0)))
        grouped = grouped.reshape(batch, -1, num_kv_heads, num_heads // num_kv_heads, head_dim)
        grouped = jnp.moveaxis(grouped, 2, 1)

        def add_block(sums, start):
            block = jax.lax.dynamic_slice_in_dim(grouped, start, size, axis=2)
            now = jax.lax.dynamic_slice_in_dim(at, start, size, axis=1)
            visible = held.live[:, :, None] & (positions[:, :, None] <= now[:, None, :, None])
            weights = received_weights(block, held.k, visible, chunk.static.scale)
            return sums + weights.astype(sums.dtype), None

        starts = jnp.arange(0, grouped.shape[2], size)
        zeros = jnp.zeros(positions.shape, state.pages.sums.dtype)
        sums, _ = jax.lax.scan(add_block, zeros, starts)
        return sums


def _add(state: PolicyState, weights: Float[Array, "B K S"], chunk: Chunk) -> PolicyState:
    """Adds weights to the sums of a layer's rows."""
    received: Received = state.pages
    table = chunk.page_table
    rows = received.sums.at[table].get(mode="fill", fill_value=0)
    new = rows + weights.reshape(rows.shape).astype(rows.dtype)
    sums = received.sums.at[table].set(new, mode="drop")
    return dataclasses.replace(state, pages=dataclasses.replace(received, sums=sums))
