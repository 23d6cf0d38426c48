"""One out, one in: attention names a victim, whose slot the next token takes.

Up to the budget everything is kept. Beyond, after the attention of each token the policy names the
slot of the lowest score. The next token overwrites it in place, so a row holds budget + 1 slots
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
from jaxtyping import Array, Bool, Float

from dms_jax.policies.budget import BudgetedPolicy, bounded, highest
from dms_jax.policies.values import (
    NOT_STORED,
    CacheShape,
    Chunk,
    Footprint,
    Observation,
    Placement,
    PolicyState,
    Rows,
    place,
)

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

    observes_weights = True

    @property
    def shrinks(self) -> bool:
        """After a prompt that was read whole."""
        return self.prefill == "dense_then_evict"

    @property
    def parallel(self):
        """Who is dropped depends on attention: token by token, but for a dense prompt."""
        return "prompts" if self.shrinks else "never"

    def footprint(self, tokens, *, page_size, group=1, compression_ratio=1) -> Footprint:
        """The budget, and the token that is too many."""
        return bounded(tokens, self.budget_for(tokens) + 1)

    def init_state(self, shape: CacheShape) -> PolicyState:
        """The slot that the next token takes, NOT_STORED for a new one."""
        return PolicyState(rows=jnp.full(shape.rows, NOT_STORED, jnp.int32))

    def write(self, state: PolicyState, chunk: Chunk) -> tuple[PolicyState, Placement]:
        """The first token takes the victim's slot, the others new ones."""
        victim, valid = state.rows[..., None], chunk.valid
        first = jnp.arange(valid.shape[-1]) == 0
        reuse = valid & first & (victim != NOT_STORED)
        live = chunk.lengths[..., None] + jnp.cumsum(valid & ~reuse, -1, dtype=jnp.int32)
        placement = place(chunk, jnp.where(reuse, victim, live - 1), live)
        gone = reuse[..., :1] & (jnp.arange(chunk.num_slots) == victim)
        past_until = jnp.where(gone, -1, placement.past_until)
        rows = jnp.where((chunk.count > 0)[:, None], NOT_STORED, state.rows)
        return (
            dataclasses.replace(state, rows=rows),
            dataclasses.replace(placement, past_until=past_until),
        )

    def scores(
        self, state: PolicyState, chunk: Chunk, weights: Float[Array, "B K G S"]
    ) -> Float[Array, "B K S"]:
        """The score of each slot after the chunk's last token; +inf for those that stay.

        Args:
          state: what the policy remembers, the weights included.
          chunk: the tokens that came last.
          weights: attention weights of the last token's query.
        """
        raise NotImplementedError

    def observe(
        self, state: PolicyState, chunk: Chunk, placement: Placement, seen: Observation
    ) -> PolicyState:
        """Names the victim once more than the budget are live."""
        if seen.weights is None:  # a prompt in one pass, which is cut at its end
            return state
        scores = self.scores(state, chunk, seen.weights)
        live = jnp.arange(scores.shape[-1]) < placement.lengths[..., None]
        victim = jnp.argmin(jnp.where(live, scores, jnp.inf), -1).astype(jnp.int32)
        victim = jnp.where(placement.lengths > self.budget_of(chunk), victim, NOT_STORED)
        rows = jnp.where((chunk.count > 0)[:, None], victim, state.rows)
        return dataclasses.replace(state, rows=rows)

    def survivors(self, state, chunk: Chunk, rows: Rows, q) -> Bool[Array, "B K S"]:
        """Those of the highest scores, as many as the budget says."""
        assert q is not None  # rows are cut at the end of a prompt alone
        last = jnp.maximum(chunk.count - 1, 0)
        query = jnp.take_along_axis(q, last[:, None, None, None], axis=1)[:, 0]
        scores = self.scores(state, chunk, query_weights(query, rows, chunk.static.scale))
        return highest(jnp.where(rows.live, scores, -jnp.inf), self.budget_of(chunk))


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
