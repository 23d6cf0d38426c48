"""Eviction of one token per step: attention selects a victim, whose slot the next token takes.

Up to the budget everything is kept. Beyond it, after each token's attention the policy selects the
slot with the lowest score. The next token overwrites it in place, so a row holds budget + 1 slots
while a query attends, and nothing is moved.

By default a prompt gets full attention and one cut at its end, as in the authors' code. With
`prefill="evict_past_budget"` its tokens are treated like generated ones, as in the DMS paper's
tables: memory never exceeds the budget, and tokens beyond it run one by one (`EvictionByToken`).
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from dms_jax.policies.budget import EvictionByToken, bounded, highest
from dms_jax.policies.values import (
    NOT_STORED,
    CacheShape,
    Chunk,
    Footprint,
    Observation,
    Placement,
    PolicyState,
    Rows,
    base_rows,
    place,
    with_base_rows,
)


@dataclasses.dataclass(frozen=True)
class VictimEviction(EvictionByToken):
    """Base of policies whose attention, or learned score, selects the token to evict.

    Attributes:
      budget: number of tokens kept after each query; one more is live while it attends.
      compression_ratio: if given, the budget is (prompt + longest answer) / compression_ratio for
        each request instead.
      prefill: see `EvictionByToken`.
    """

    observes_weights = True

    def footprint(self, tokens, *, page_size, group=1, compression_ratio=1) -> Footprint:
        """Returns a footprint of at most the budget plus one token to be evicted."""
        return bounded(tokens, self.budget_for(tokens) + 1)

    def init_state(self, shape: CacheShape) -> PolicyState:
        """Returns the slot for the next token of each row; NOT_STORED for a new slot."""
        return PolicyState(rows=jnp.full(shape.rows, NOT_STORED, jnp.int32))

    def write(self, state: PolicyState, chunk: Chunk) -> tuple[PolicyState, Placement]:
        """Gives the first token the victim's slot, and the others new slots."""
        victim, valid = base_rows(state.rows)[..., None], chunk.valid
        first = jnp.arange(valid.shape[-1]) == 0
        reuse = valid & first & (victim != NOT_STORED)
        live = chunk.lengths[..., None] + jnp.cumsum(valid & ~reuse, -1, dtype=jnp.int32)
        placement = place(chunk, jnp.where(reuse, victim, live - 1), live)
        gone = reuse[..., :1] & (jnp.arange(chunk.num_slots) == victim)
        past_until = jnp.where(gone, -1, placement.past_until)
        return (
            self._replace_victim(state, chunk, NOT_STORED),
            dataclasses.replace(placement, past_until=past_until),
        )

    def scores(
        self, state: PolicyState, chunk: Chunk, weights: Float[Array, "B K G S"]
    ) -> Float[Array, "B K S"]:
        """Returns the score of each slot after the chunk's last token; +inf to protect it.

        Args:
          state: the policy's state, updated with the weights.
          chunk: the most recent tokens.
          weights: attention weights of the last token's query.
        """
        raise NotImplementedError

    def observe(
        self, state: PolicyState, chunk: Chunk, placement: Placement, seen: Observation
    ) -> PolicyState:
        """Selects the victim if a row holds more live tokens than the budget."""
        if seen.weights is None:  # a one-pass prompt, which is cut at its end
            return state
        return self.select_victim(state, chunk, placement, self.scores(state, chunk, seen.weights))

    def select_victim(
        self,
        state: PolicyState,
        chunk: Chunk,
        placement: Placement,
        scores: Float[Array, "B K S"],
    ) -> PolicyState:
        """Selects the slot with the lowest score in rows above the budget."""
        live = jnp.arange(scores.shape[-1]) < placement.lengths[..., None]
        victim = jnp.argmin(jnp.where(live, scores, jnp.inf), -1).astype(jnp.int32)
        victim = jnp.where(placement.lengths > self.budget_of(chunk), victim, NOT_STORED)
        return self._replace_victim(state, chunk, victim)

    def _replace_victim(self, state: PolicyState, chunk: Chunk, victim) -> PolicyState:
        """Sets the victim of rows with tokens in the chunk."""
        victim = jnp.where((chunk.count > 0)[:, None], victim, base_rows(state.rows))
        return dataclasses.replace(state, rows=with_base_rows(state.rows, victim))

    def survivors(self, state, chunk: Chunk, rows: Rows, q) -> Bool[Array, "B K S"]:
        """Keeps the slots with the highest scores, within the budget."""
        assert q is not None  # rows are only cut at the end of a prompt
        last = jnp.maximum(chunk.count - 1, 0)
        query = jnp.take_along_axis(q, last[:, None, None, None], axis=1)[:, 0]
        scores = self.scores(state, chunk, query_weights(query, rows, chunk.static.scale))
        return highest(jnp.where(rows.live, scores, -jnp.inf), self.budget_of(chunk))


def query_weights(q: Float[Array, "B H D"], rows: Rows, scale: float) -> Float[Array, "B K G S"]:
    """Returns the attention weights of one query per sequence over its rows."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    batch, num_kv_heads = rows.k.shape[:2]
    grouped = q.reshape(batch, num_kv_heads, -1, q.shape[-1]).astype(wide)
    scores = scale * jnp.einsum("BKGD,BKSD->BKGS", grouped, rows.k.astype(wide))
    live = rows.live[:, :, None]
    scores = jnp.where(live, scores, -jnp.inf)
    weights = jnp.exp(scores - jnp.maximum(scores.max(-1, keepdims=True), -1e30))
    return weights / jnp.maximum(weights.sum(-1, keepdims=True), jnp.finfo(wide).tiny)
