"""H2O (Zhang et al., arXiv 2306.14048): heavy hitters and the recent tokens.

Each KV head keeps, for every token in its cache, the sum of the attention weights that the token
has received from all queries since it arrived, its own included:

    s_j = sum over queries i >= j of  mean over the group of softmax(q_i K)_j

With grouped queries the weight of a query is the mean over the group (the paper has one head a
group; a mean ranks as a sum does). It is a sum and no mean over queries, so old tokens are
favoured, as published. Beyond the budget, half of it are the most recent tokens and the other half
those with the largest sums; after each query the lightest of the tokens that are not recent goes,
and its sum with it.

After a dense prompt the sums are those over all its queries. They are computed chunk by chunk from
a second pass over the scores, in blocks of queries: memory is linear in the prompt.
"""

import dataclasses
from typing import no_type_check

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from dms_jax.policies.slots import put_slots, slot_values
from dms_jax.policies.values import PAGES, CacheShape, Chunk, Placement, PolicyState
from dms_jax.policies.victims import VictimEviction

BLOCK = 64  # queries of a prompt that are summed at a time


@no_type_check  # jax also builds it of shapes and of partitions
@struct.dataclass
class Received:
    """What the token in each slot has received, and its position."""

    sums: Float[Array, "N P"] = struct.field(metadata=PAGES)
    positions: Int[Array, "N P"] = struct.field(metadata=PAGES)


@dataclasses.dataclass(frozen=True)
class H2O(VictimEviction):
    """Keeps half the budget by accumulated attention, half by recency.

    Attributes:
      budget, compression_ratio, prefill: see `VictimEviction`; of an odd budget the recent tokens
        are the larger half.
    """

    def init_state(self, shape: CacheShape) -> PolicyState:
        """Nothing received yet."""
        pages = Received(
            sums=jnp.zeros(shape.pages, shape.wide), positions=jnp.zeros(shape.pages, jnp.int32)
        )
        return dataclasses.replace(super().init_state(shape), pages=pages)

    def written(self, state: PolicyState, chunk: Chunk, placement: Placement, pool) -> PolicyState:
        """A new token has received nothing yet."""
        received: Received = state.pages
        positions = jnp.broadcast_to(chunk.tokens.positions[:, None], placement.slots.shape)
        received = Received(
            sums=put_slots(received.sums, chunk.page_table, placement.slots, 0),
            positions=put_slots(received.positions, chunk.page_table, placement.slots, positions),
        )
        return dataclasses.replace(state, pages=received)

    def observe(self, state: PolicyState, chunk: Chunk, placement, seen) -> PolicyState:
        """Adds the weights of a query, or of all queries of a chunk in one pass."""
        if seen.weights is None:
            return _add(state, self._received_from(state, chunk, seen.q, seen.rows()), chunk)
        state = _add(state, seen.weights.mean(2), chunk)
        return super().observe(state, chunk, placement, seen)

    def scores(self, state, chunk, weights) -> Float[Array, "B K S"]:
        """The sums; recent tokens score +inf."""
        budget = self.budget_of(chunk)
        recent = budget - budget // 2
        positions = slot_values(state.pages.positions, chunk.page_table)
        is_recent = positions > (chunk.newest[:, None] - recent)[..., None]
        return jnp.where(is_recent, jnp.inf, slot_values(state.pages.sums, chunk.page_table))

    def _received_from(self, state: PolicyState, chunk: Chunk, q, held) -> Float[Array, "B K S"]:
        """What each slot receives from all queries of a chunk."""
        positions = slot_values(state.pages.positions, chunk.page_table)
        batch, num_tokens, num_heads, head_dim = q.shape
        num_kv_heads = held.k.shape[1]
        wide = state.pages.sums.dtype
        keys = held.k.astype(wide)
        padding = -num_tokens % min(BLOCK, num_tokens)
        # Padded queries are those of no one: position -1 sees nothing.
        at = jnp.where(chunk.valid[:, 0], chunk.tokens.positions, -1)
        at = jnp.pad(at, ((0, 0), (0, padding)), constant_values=-1)
        grouped = jnp.pad(q, ((0, 0), (0, padding), (0, 0), (0, 0))).astype(wide)
        grouped = grouped.reshape(batch, -1, num_kv_heads, num_heads // num_kv_heads, head_dim)

        def add_block(sums, start):
            block = jax.lax.dynamic_slice_in_dim(grouped, start, size, axis=1)
            now = jax.lax.dynamic_slice_in_dim(at, start, size, axis=1)
            scores = chunk.static.scale * jnp.einsum("BTKGD,BKSD->BKGTS", block, keys)
            visible = held.live[:, :, None] & (positions[:, :, None] <= now[:, None, :, None])
            visible = visible[:, :, None]
            weights = jax.nn.softmax(jnp.where(visible, scores, -1e30), axis=-1)
            return sums + jnp.where(visible, weights, 0).mean(2).sum(2), None

        size = min(BLOCK, num_tokens)
        starts = jnp.arange(0, grouped.shape[1], size)
        sums, _ = jax.lax.scan(add_block, jnp.zeros(positions.shape, wide), starts)
        return sums


def _add(state: PolicyState, weights: Float[Array, "B K S"], chunk: Chunk) -> PolicyState:
    """Adds to the sums of a layer's rows."""
    received: Received = state.pages
    table = chunk.page_table
    rows = received.sums.at[table].get(mode="fill", fill_value=0)
    new = rows + weights.reshape(rows.shape).astype(rows.dtype)
    sums = received.sums.at[table].set(new, mode="drop")
    return dataclasses.replace(state, pages=dataclasses.replace(received, sums=sums))
