"""KVpop (arXiv 2607.05061): a learned score when a token leaves the window; a budget per head.

    score_j = 10 (own(x_j) + late(x_{j + window})) - 6

A token is scored when it leaves the window of recent tokens, with the information available then:
`own` reads the residual stream at the token, `late` at the token that pushes it out. Both are
outputs of one scorer per layer, and their sum is regressed (squared error) on the logarithm of the
importance to later queries (`importance.py`, "mean"), while the model is frozen and nothing is
evicted. Once a head holds its budget, each step evicts the token with the lowest score among those
beyond the window, and the next token takes its slot: all heads have the same length, and one
training serves every budget.

Differences from the publication (only its abstract was available): its scorer carries a recurrent
state over the window (an xLSTM), which `late` replaces here; and it trains all weights.

A prompt gets full attention and one cut, or runs like an answer (`victims.py`).
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from dms_jax.checks import Whole, require
from dms_jax.policies.budget import highest
from dms_jax.policies.delayed_eviction import shift_left
from dms_jax.policies.importance import predicted
from dms_jax.policies.slots import put_slots, slot_values
from dms_jax.policies.values import (
    NOT_STORED,
    AdapterShape,
    CacheShape,
    Chunk,
    Decisions,
    Extended,
    FutureAttention,
    Observation,
    Placement,
    PolicyState,
    Retrofit,
    Rows,
    Tokens,
)
from dms_jax.policies.victims import VictimEviction

# Score stored for a token within the window: this plus the token's position modulo window.
WITHIN_WINDOW = 2.0**22  # float32 represents integers exactly up to four times this


@dataclasses.dataclass(frozen=True)
class KVpop(VictimEviction):
    """Keeps the window and, within the budget of a head, the tokens with the highest scores.

    Beside its victim, a row keeps `own` of the tokens in its window, [B, K, W], by position modulo
    window.

    Attributes:
      budget, compression_ratio, prefill: see `VictimEviction`; the budget includes the window.
      window: distance up to which every key stays visible to queries. A token is scored when it
        leaves the window, so a scorer works best with the window of its training.
      hidden: hidden units of the scorer; 0 for a linear one.
    """

    window: Whole = 128
    hidden: Whole = 64

    observes_weights = False

    def __post_init__(self):
        super().__post_init__()
        require(
            self.budget > self.window,
            f"KVpop: a budget of {self.budget} tokens does not hold the {self.window} recent ones "
            "and another; raise the budget or set a smaller window.",
        )

    @property
    def least_budget(self) -> int:
        """See `BudgetedPolicy.least_budget`: one token more than the window."""
        return self.window + 1

    @property
    def retrofit(self) -> Retrofit:
        """The scorer. Budget, window and prefill may change after training."""
        return Retrofit(
            decisions=f"KVpop(hidden={self.hidden})",
            adapter=AdapterShape(hidden=self.hidden, bias=True, late=True),
            supervision=FutureAttention(self.window, reduction="mean"),
        )

    def decide(self, tokens: Tokens) -> Decisions:
        """Returns each token's score of itself, and of the token that it pushes out."""
        assert tokens.adapter_logits is not None
        assert tokens.late_logits is not None
        return Decisions(
            importance=predicted(tokens.adapter_logits),
            late=predicted(tokens.late_logits, level=0.0),
        )

    def predictions(self, decisions: Decisions) -> Float[Array, "B K T"]:
        """Returns the score of each key as it leaves the window."""
        assert decisions.importance is not None
        assert decisions.late is not None
        return decisions.importance + shift_left(decisions.late, self.window)

    def init_state(self, shape: CacheShape) -> PolicyState:
        """Returns no victim, an empty window and zero scores."""
        own = jnp.zeros((*shape.rows, max(self.window, 1)), shape.wide)
        return PolicyState(
            rows=Extended(super().init_state(shape).rows, own),
            pages=jnp.zeros(shape.pages, shape.wide),
        )

    def written(self, state: PolicyState, chunk: Chunk, placement: Placement, pool) -> PolicyState:
        """Scores tokens that leave the window, and marks the slots of tokens in it."""
        window: Extended = state.rows
        pages, table = self._leave(state.pages, window.own, chunk), chunk.page_table
        pages = put_slots(pages, table, placement.slots, self._stored_scores(chunk))
        window = dataclasses.replace(window, own=self._enter(window.own, chunk))
        return dataclasses.replace(state, rows=window, pages=pages)

    def _leave(
        self, pages: Float[Array, "N P"], own: Float[Array, "B K W"], chunk: Chunk
    ) -> Float[Array, "N P"]:
        """Scores each earlier token that the chunk pushes out of the window."""
        late, first, table = _late_scores(chunk), chunk.first[:, None, None], chunk.page_table
        size = own.shape[-1]
        worth = slot_values(pages, table)
        live = jnp.arange(worth.shape[-1]) < chunk.lengths[..., None]
        place = jnp.where(live & (worth >= WITHIN_WINDOW), worth - WITHIN_WINDOW, -1)
        place = place.astype(jnp.int32)
        pushed_by = (place - first) % size  # index in the chunk
        leaves = (place >= 0) & (pushed_by < chunk.count[:, None, None])
        if late.shape[-1] == 1:  # at most one slot of a row
            slot = jnp.argmax(leaves, axis=-1, keepdims=True)
            slot = jnp.where(leaves.any(-1, keepdims=True), slot, NOT_STORED)
            index = jnp.broadcast_to(first % size, slot.shape)
            return put_slots(
                pages, table, slot, _score(jnp.take_along_axis(own, index, axis=-1), late)
            )
        early = jnp.take_along_axis(own, jnp.maximum(place, 0), axis=-1)
        pushing = jnp.minimum(pushed_by, late.shape[-1] - 1)
        score = _score(early, jnp.take_along_axis(late, pushing, axis=-1))
        rows = jnp.where(leaves, score, worth).reshape(*table.shape, -1)
        return pages.at[table].set(rows, mode="drop")

    def _stored_scores(self, chunk: Chunk) -> Float[Array, "B K T"]:
        """Returns the stored score of each token of the chunk, once the whole chunk is written."""
        index = jnp.arange(_late_scores(chunk).shape[-1])
        place = (chunk.first[:, None] + index) % max(self.window, 1)
        leaves = index + self.window < chunk.count[:, None]
        score = self.predictions(chunk.decisions)
        score = jnp.minimum(score, WITHIN_WINDOW / 2)
        return jnp.where(leaves[:, None], score, WITHIN_WINDOW + place[:, None])

    def _enter(self, own: Float[Array, "B K W"], chunk: Chunk) -> Float[Array, "B K W"]:
        """Returns `own` of the newest tokens."""
        new = chunk.decisions.importance
        assert new is not None
        place, newest = jnp.arange(own.shape[-1]), chunk.newest[:, None]
        index = newest - (newest - place) % own.shape[-1] - chunk.first[:, None]
        is_new = (index >= 0) & (chunk.count > 0)[:, None]
        index = jnp.broadcast_to(jnp.maximum(index, 0)[:, None], own.shape)
        return jnp.where(is_new[:, None], jnp.take_along_axis(new, index, axis=-1), own)

    def scores(self, state: PolicyState, chunk: Chunk, weights=None) -> Float[Array, "B K S"]:
        """Returns the score of each slot; tokens within the window score +inf."""
        worth = slot_values(state.pages, chunk.page_table)
        return jnp.where(worth >= WITHIN_WINDOW, jnp.inf, worth)

    def observe(
        self, state: PolicyState, chunk: Chunk, placement: Placement, seen: Observation
    ) -> PolicyState:
        """Selects the victim of a step; a prompt in one pass is cut at its end."""
        if not seen.one_query:
            return state
        return self.select_victim(state, chunk, placement, self.scores(state, chunk))

    def survivors(self, state, chunk: Chunk, rows: Rows, q) -> Bool[Array, "B K S"]:
        """Keeps the slots with the highest scores, within the budget."""
        scores = self.scores(state, chunk)
        return highest(jnp.where(rows.live, scores, -jnp.inf), self.budget_of(chunk))


def _late_scores(chunk: Chunk) -> Float[Array, "B K T"]:
    """Returns each token's score of the token that it pushes out of the window."""
    assert chunk.decisions.late is not None
    return chunk.decisions.late


def _score(own: Float[Array, "..."], late: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns the score of a token: a logarithm, clipped below `WITHIN_WINDOW`."""
    return jnp.minimum(own + late, WITHIN_WINDOW / 2)
