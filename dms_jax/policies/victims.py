"""One out, one in: attention names a victim, whose slot the next token takes.

Up to the budget everything is kept. Beyond, after the attention of each token the policy names the
slot that is worth least. The next token overwrites it in place, so a row holds budget + 1 slots
while a query attends, and nothing moves.

Prompts, in two readings:

* `prefill="evict_past_budget"`: the tokens of a prompt are treated like those of an answer, as the
  DMS paper ran these baselines (arXiv 2506.05345, appendix G.1): memory never exceeds the budget,
  and prompts are run token by token;
* `prefill="dense_then_evict"`: a prompt attends to all of itself in one pass a chunk, as in the
  published code; one cut after it leaves the budget, and gives back the pages.
"""

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dms_jax.policies.base import (
    FOREVER,
    NOT_STORED,
    Chunk,
    Placement,
    PolicyState,
    Rows,
    row_shape,
    slot_shape,
)
from dms_jax.policies.budget import BudgetedPolicy, highest

Prefill = Literal["evict_past_budget", "dense_then_evict"]


@dataclasses.dataclass(frozen=True)
class VictimEviction(BudgetedPolicy):
    """Base of policies that drop one token a step.

    Attributes:
      budget: tokens that survive each query; one more is live while it attends.
      compression_ratio: if given, the budget is (prompt + longest answer) / compression_ratio of
        each request instead.
      prefill: whether eviction begins inside the prompt or after it.
    """

    prefill: Prefill = "evict_past_budget"

    observes = True

    @property
    def shrinks(self) -> bool:
        """After a prompt that was read whole."""
        return self.prefill == "dense_then_evict"

    @property
    def split_invariant(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Only where prompts are treated like answers."""
        return not self.shrinks

    def parallel(self, *, prompt: bool) -> bool:
        """Who is dropped depends on attention: token by token, but for a dense prompt."""
        return prompt and self.shrinks

    def slot_limit(self, page_size: int) -> int | None:
        """The budget, and the token that is too many."""
        del page_size
        return None if self.compression_ratio is not None else self.budget + 1

    def init_rows(self, num_sequences, num_kv_heads, head_dim, dtype) -> Int[Array, "B K"]:
        """The slot that the next token takes, NOT_STORED for a new one."""
        del head_dim, dtype
        return jnp.full((num_sequences, num_kv_heads), NOT_STORED, jnp.int32)

    def write(self, state: PolicyState, chunk: Chunk) -> tuple[PolicyState, Placement]:
        """The first token takes the victim's slot, the others new ones."""
        victim = state.rows[..., None]
        valid = jnp.broadcast_to(chunk.valid, row_shape(chunk))
        first = jnp.arange(chunk.k.shape[1]) == 0
        reuse = valid & first & (victim != NOT_STORED)
        live = chunk.lengths[..., None] + jnp.cumsum(valid & ~reuse, -1, dtype=jnp.int32)
        slots = jnp.where(reuse, victim, live - 1)
        gone = reuse[..., :1] & (jnp.arange(slot_shape(chunk)[-1]) == victim)
        rows = jnp.where((chunk.count > 0)[:, None], NOT_STORED, state.rows)
        return dataclasses.replace(state, rows=rows), Placement(
            k=chunk.k,
            v=chunk.v,
            slots=jnp.where(valid, slots, NOT_STORED),
            lengths=live[..., -1],
            live=live,
            evicted=jnp.zeros_like(valid),
            past_until=jnp.where(gone, -1, FOREVER).astype(jnp.int32),
        )

    def worth(
        self,
        state: PolicyState,
        weights: Float[Array, "B K G S"],
        page_table: Int[Array, "B K M"],
        newest: Int[Array, " B"],
        budget: Int[Array, "B 1"],
        head_axis: str | None,
    ) -> Float[Array, "B K S"]:
        """What each slot is worth after the token at position `newest`; inf for those that stay.

        `weights` are those of its query, in the step that adds them to what the policy remembers
        (`learn`) as well as in the cut after a prompt, where that has been done.
        """
        raise NotImplementedError

    def learn(
        self, state: PolicyState, weights: Float[Array, "B K G S"], chunk: Chunk
    ) -> PolicyState:
        """Remembers the attention weights of one query."""
        del weights, chunk
        return state

    def observe(
        self,
        state: PolicyState,
        weights: Float[Array, "B K G S"],
        chunk: Chunk,
        placement: Placement,
        head_axis: str | None,
    ) -> PolicyState:
        """Names the victim once more than the budget are live."""
        state = self.learn(state, weights, chunk)
        budget = self.budget_of(chunk)
        newest = chunk.first + chunk.count - 1
        worth = self.worth(state, weights, chunk.page_table, newest, budget, head_axis)
        live = jnp.arange(worth.shape[-1]) < placement.lengths[..., None]
        victim = jnp.argmin(jnp.where(live, worth, jnp.inf), -1).astype(jnp.int32)
        victim = jnp.where(placement.lengths > budget, victim, NOT_STORED)
        return dataclasses.replace(
            state, rows=jnp.where((chunk.count > 0)[:, None], victim, state.rows)
        )

    def survivors(
        self,
        state: PolicyState,
        q: Float[Array, "B T H D"],
        rows: Rows,
        chunk: Chunk,
        scale: float,
        head_axis: str | None,
    ) -> Bool[Array, "B K S"]:
        """Those worth most, as many as the budget says."""
        last = jnp.maximum(chunk.count - 1, 0)
        query = jnp.take_along_axis(q, last[:, None, None, None], axis=1)[:, 0]
        budget = self.budget_of(chunk)
        newest = chunk.first + last
        weights = query_weights(query, rows, scale)
        worth = self.worth(state, weights, chunk.page_table, newest, budget, head_axis)
        return highest(jnp.where(rows.live, worth, -jnp.inf), budget)


def query_weights(q: Float[Array, "B H D"], rows: Rows, scale: float) -> Float[Array, "B K G S"]:
    """The attention weights of one query of each sequence over its rows."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    batch, num_kv_heads = rows.k.shape[:2]
    grouped = q.reshape(batch, num_kv_heads, -1, q.shape[-1]).astype(wide)
    scores = scale * jnp.einsum("BKGD,BKSD->BKGS", grouped, rows.k.astype(wide))
    live = rows.live[:, :, None]
    scores = jnp.where(live, scores, -jnp.inf)
    weights = jnp.exp(scores - jnp.maximum(scores.max(-1, keepdims=True), -1e30))
    return weights / jnp.maximum(weights.sum(-1, keepdims=True), jnp.finfo(wide).tiny)
