"""Periodic eviction: rows grow, and are cut back to a budget by scores.

The standard training-free methods differ in one function, the scores of the tokens in the cache;
this module is the common part. A prompt gets full attention, each chunk in one pass; after its last
token each row is cut to the `budget` tokens with the highest scores. Then tokens are appended, and
when the rows of a layer hold budget + interval tokens on average, they are cut back after that
step's attention (kvpress's published decoding has a budget of 2048 and an interval of 512). The
kept tokens stay in order, so the last slots of a row are always the most recent tokens, and the
pages freed by a cut are released.
"""

import dataclasses
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dms_jax.checks import Range, Traced, require
from dms_jax.policies.base import Policy
from dms_jax.policies.budget import LONGEST, BudgetedPolicy, bounded, highest
from dms_jax.policies.values import (
    CacheShape,
    Chunk,
    Extended,
    Footprint,
    PolicyState,
    Rows,
    TracedInt,
)

Interval = Annotated[
    Annotated[int, Range(1, LONGEST)] | None, "give None to cut after the prompt alone", Traced(int)
]


@dataclasses.dataclass(frozen=True)
class PeriodicEviction(Policy):
    """The mechanism of periodic eviction: the time of cuts, and the slots to keep."""

    @property
    def shrinks(self) -> bool:
        """See `Policy.shrinks`: rows are cut after the prompt, and during the answer."""
        return True

    @property
    def parallel(self):
        """Prompts in one pass; answers token by token, because a cut may come after any token."""
        return "prompts"

    @property
    def cut_interval(self) -> TracedInt | None:
        """Number of tokens appended between two cuts; None to cut after the prompt only."""
        raise NotImplementedError

    @property
    def protected(self) -> TracedInt:
        """Number of tokens per row that are always kept because they score +inf."""
        return 0

    def layer_budget(self, chunk: Chunk) -> Int[Array, "B 1"]:
        """Returns the tokens that a row of this layer keeps, on average over the layer's rows."""
        raise NotImplementedError

    def scores(self, state: PolicyState, chunk: Chunk, rows: Rows) -> Float[Array, "B K S"]:
        """Returns the score of each slot; +inf for slots that are always kept.

        Args:
          state: the policy's state.
          chunk: the most recent tokens.
          rows: the contents of the cache, including the chunk.
        """
        raise NotImplementedError

    def select(
        self, scores: Float[Array, "B K S"], budget: Int[Array, "B 1"], chunk: Chunk
    ) -> Bool[Array, "B K S"]:
        """Returns the retention mask; unused slots score -inf."""
        return highest(scores, budget)

    def survivors(self, state, chunk, rows, q) -> Bool[Array, "B K S"]:
        """Keeps the slots with the highest scores."""
        scores = jnp.where(rows.live, self.scores(state, chunk, rows), -jnp.inf)
        return self.select(scores, self.layer_budget(chunk), chunk)

    def due(
        self, state: PolicyState, lengths: Int[Array, "B K"], chunk: Chunk
    ) -> Bool[Array, " B"] | None:
        """Returns whether the rows of the layer hold budget + interval tokens on average."""
        if self.cut_interval is None:
            return None
        return holds(lengths, self.layer_budget(chunk)[:, 0] + self.cut_interval, chunk)


@dataclasses.dataclass(frozen=True)
class Scorer(BudgetedPolicy, PeriodicEviction):
    """Base of policies that score the tokens of a row.

    Attributes:
      budget: number of tokens that a row keeps.
      compression_ratio: if given, the budget is (prompt + longest answer) / compression_ratio for
        each request instead.
      interval: number of generated tokens after which rows are cut back to the budget; None to cut
        after the prompt only.
    """

    interval: Interval = 512

    protected_by: ClassVar[str] = "by rule"  # the field that sets `protected`

    def __post_init__(self):
        super().__post_init__()
        fewer = f", or give {self.protected_by}={self.budget // 2}"
        require(
            self.budget > int(self.protected),
            f"{self.name}: a budget of {self.budget} tokens holds nothing beside the "
            f"{self.protected} that always stay ({self.protected_by}); raise the budget"
            f"{fewer if hasattr(self, self.protected_by) else ''}.",
        )

    @property
    def least_budget(self) -> TracedInt:
        """See `BudgetedPolicy.least_budget`: one token more than `protected`."""
        return self.protected + 1

    @property
    def cut_interval(self) -> TracedInt | None:
        """See `PeriodicEviction.cut_interval`: the policy's interval."""
        return self.interval

    def layer_budget(self, chunk: Chunk) -> Int[Array, "B 1"]:
        """Returns the budget, which is the same for every layer."""
        return self.budget_of(chunk)

    def footprint(self, tokens, *, page_size, group=1, compression_ratio=1) -> Footprint:
        """Returns the budget and the tokens that are appended before the next cut."""
        budget = self.budget_for(tokens)
        return bounded(tokens, None if self.interval is None else budget + self.interval)


@dataclasses.dataclass(frozen=True)
class AnswerEviction(Scorer):
    """Base of policies for long answers: the end of a prompt cuts nothing.

    A row keeps the number of tokens of its prompt, [B, K] (0 before it is prefilled), and beside it
    the subclass's own state.

    Attributes:
      budget, compression_ratio: see `Scorer`.
      interval: number of generated tokens between two cuts.
    """

    interval: Annotated[int, Range(1, LONGEST), Traced(int)] = 128

    @property
    def shrinks(self) -> bool:
        """See `Policy.shrinks`: a prompt stays whole until a cut in its answer."""
        return False

    def footprint(self, tokens, *, page_size, group=1, compression_ratio=1) -> Footprint:
        """Returns the budget plus an interval on average; no bound, because prompts stay whole."""
        slots = min(tokens, self.budget_for(tokens) + self.interval)
        return Footprint(slots, 0, None, reads=slots, attended=slots)

    def init_own(self, shape: CacheShape) -> Any:
        """Returns the subclass's own state for empty rows."""
        return ()

    def observe_own(self, own: Any, chunk: Chunk, q: Float[Array, "B T H D"]) -> Any:
        """Updates the subclass's own state; q are the chunk's rotated queries."""
        return own

    def init_state(self, shape: CacheShape) -> PolicyState:
        """Returns the state of rows without a prompt."""
        prompt = jnp.zeros(shape.rows, jnp.int32)
        return PolicyState(rows=Extended(prompt, self.init_own(shape)))

    def observe(self, state: PolicyState, chunk: Chunk, placement, seen) -> PolicyState:
        """Counts the tokens of a prompt, which arrive in one-pass chunks."""
        rows: Extended = state.rows
        prompt = rows.base
        if chunk.static.one_pass:
            read = jnp.where(chunk.count > 0, chunk.newest + 1, prompt[:, 0])
            prompt = jnp.broadcast_to(read[:, None], prompt.shape)
        own = self.observe_own(rows.own, chunk, seen.q)
        return dataclasses.replace(state, rows=Extended(prompt, own))


def holds(lengths: Int[Array, "B K"], tokens: Int[Array, " B"], chunk: Chunk) -> Bool[Array, " B"]:
    """Returns whether the rows of a layer hold at least `tokens` tokens on average."""
    total, heads = lengths.sum(1), lengths.shape[1]
    if chunk.static.head_axis is not None:
        total, heads = jax.lax.psum((total, heads), chunk.static.head_axis)
    return total >= heads * tokens
