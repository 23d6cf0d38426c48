"""KVpop (arXiv 2607.05061): a learned score as a token leaves the window, a fixed budget a head.

    score_j = 10 (own(x_j) + late(x_{j + window})) - 6

A token is scored when it leaves the window of recent tokens, with what the model knows by then:
`own` reads the residual stream at the token and `late` at the one that pushes it out. Both are
outputs of one scorer per layer, and their sum is regressed (squared error) on the logarithm of the
importance to later queries (`importance.py`, "mean"), while the model is frozen and nothing is
evicted. Once a head holds its budget, each step evicts the token with the lowest score among those
beyond the window, and the next token takes its slot: all heads have the same length, and one
training serves every budget.

What differs from the publication, of which we know the abstract: its scorer carries a recurrent
state over the window (an xLSTM), for which `late` stands here; and it trains all weights.

A prompt is run token by token, or gets full attention and one cut (`victims.py`).
"""

import dataclasses
from typing import no_type_check

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dms_jax.checks import Whole, require
from dms_jax.policies.budget import highest
from dms_jax.policies.importance import predicted
from dms_jax.policies.slots import put_slots, slot_values
from dms_jax.policies.values import (
    NOT_STORED,
    PAGES,
    AdapterShape,
    CacheShape,
    Chunk,
    Decisions,
    FutureAttention,
    Observation,
    Placement,
    PolicyState,
    Retrofit,
    Rows,
    Tokens,
)
from dms_jax.policies.victims import VictimEviction


@no_type_check  # jax also builds it from shapes and from partitions
@struct.dataclass
class Scored:
    """Score and position of the token in each slot; without `late` inside the window."""

    scores: Float[Array, "N P"] = struct.field(metadata=PAGES)
    positions: Int[Array, "N P"] = struct.field(metadata=PAGES)


@dataclasses.dataclass(frozen=True)
class KVpop(VictimEviction):
    """Keeps the window and, within the budget of a head, the tokens with the highest scores.

    Attributes:
      budget, compression_ratio, prefill: see `VictimEviction`; the budget holds the window.
      window: distance up to which every key stays visible to queries; its end is when a token is
        scored, so a scorer works best with the window that it was trained with.
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
        """Returns what each token says of itself, and of the one that it pushes out."""
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
        late = decisions.late
        moved = jnp.pad(late[..., self.window :], ((0, 0), (0, 0), (0, self.window)))
        return decisions.importance + moved[..., : late.shape[-1]]

    def init_state(self, shape: CacheShape) -> PolicyState:
        """Returns the state of `VictimEviction`, and zero scores and positions."""
        pages = Scored(
            scores=jnp.zeros(shape.pages, shape.wide), positions=jnp.zeros(shape.pages, jnp.int32)
        )
        return dataclasses.replace(super().init_state(shape), pages=pages)

    def written(self, state: PolicyState, chunk: Chunk, placement: Placement, pool) -> PolicyState:
        """Stores the chunk's own scores and positions, and scores what leaves the window."""
        scored: Scored = state.pages
        positions = jnp.broadcast_to(chunk.tokens.positions[:, None], placement.slots.shape)
        table, own = chunk.page_table, chunk.decisions.importance
        positions = put_slots(scored.positions, table, placement.slots, positions)
        scores = put_slots(scored.scores, table, placement.slots, own)
        scores = self._add_late(scores, slot_values(positions, table), chunk, placement)
        return dataclasses.replace(state, pages=Scored(scores=scores, positions=positions))

    def _add_late(
        self,
        scores: Float[Array, "N P"],
        positions: Int[Array, "B K S"],
        chunk: Chunk,
        placement: Placement,
    ) -> Float[Array, "N P"]:
        """Adds `late` of the token that pushes it out to each token that leaves the window."""
        late = chunk.decisions.late
        assert late is not None
        table, num_tokens = chunk.page_table, late.shape[-1]
        pushed_by = positions + self.window - chunk.first[:, None, None]  # index in the chunk
        live = jnp.arange(positions.shape[-1]) < placement.lengths[..., None]
        leaves = live & (pushed_by >= 0) & (pushed_by < chunk.count[:, None, None])
        rows = slot_values(scores, table)
        if num_tokens == 1:  # at most one slot of a row
            slot = jnp.argmax(leaves, axis=-1, keepdims=True)
            new = jnp.take_along_axis(rows, slot, axis=-1) + late
            slot = jnp.where(leaves.any(-1, keepdims=True), slot, NOT_STORED)
            return put_slots(scores, table, slot, new)
        added = jnp.take_along_axis(late, jnp.clip(pushed_by, 0, num_tokens - 1), axis=-1)
        rows += jnp.where(leaves, added, 0)
        return scores.at[table].set(rows.reshape(*table.shape, -1), mode="drop")

    def scores(self, state: PolicyState, chunk: Chunk, weights=None) -> Float[Array, "B K S"]:
        """Returns the score of each slot; tokens within the window score +inf."""
        positions = slot_values(state.pages.positions, chunk.page_table)
        is_recent = positions > (chunk.newest[:, None] - self.window)[..., None]
        return jnp.where(is_recent, jnp.inf, slot_values(state.pages.scores, chunk.page_table))

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
