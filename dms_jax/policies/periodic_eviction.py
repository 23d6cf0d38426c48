"""Periodic eviction: rows grow, and are cut back to a budget by scores.

The standard methods that need no training differ in one function: the scores of the tokens in the
cache. The rest is the same, and is here. A prompt attends to all of itself, a chunk in one pass;
after its last token each row is cut to the `budget` tokens of the highest scores. From then on
tokens are appended, and whenever the rows of a layer hold budget + interval tokens on average, they
are cut back after the attention of that step (a budget of 2048 and an interval of 512 is the
published decoding of kvpress). Tokens that stay keep their order, so the last slots of a row are
always the most recent tokens, and the pages behind the cut are given back.
"""

import dataclasses
from typing import Annotated, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dms_jax.checks import Range, require
from dms_jax.policies.base import Policy
from dms_jax.policies.budget import LONGEST, BudgetedPolicy, bounded, highest
from dms_jax.policies.values import Chunk, Footprint, PolicyState, Rows

Interval = Annotated[
    Annotated[int, Range(1, LONGEST)] | None, "give None to cut after the prompt alone"
]


@dataclasses.dataclass(frozen=True)
class PeriodicEviction(Policy):
    """The mechanism: when rows are cut, and which slots stay by their scores."""

    @property
    def shrinks(self) -> bool:
        """After the prompt, and while answering."""
        return True

    @property
    def parallel(self):
        """Prompts in one pass; answers token by token, for a cut may come between two."""
        return "prompts"

    @property
    def cut_interval(self) -> int | None:
        """Tokens that are appended between two cuts; None for no cut but that after a prompt."""
        raise NotImplementedError

    @property
    def protected(self) -> int:
        """Tokens of a row that always stay, because their scores are +inf."""
        return 0

    def layer_budget(self, chunk: Chunk) -> Int[Array, "B 1"]:
        """Tokens that a row of this layer keeps, on average over the layer's rows."""
        raise NotImplementedError

    def scores(self, state: PolicyState, chunk: Chunk, rows: Rows) -> Float[Array, "B K S"]:
        """The score of each slot; +inf for those that stay in any case.

        Args:
          state: what the policy remembers.
          chunk: the tokens that came last.
          rows: what the cache holds, the chunk included.
        """
        raise NotImplementedError

    def select(
        self, scores: Float[Array, "B K S"], budget: Int[Array, "B 1"], chunk: Chunk
    ) -> Bool[Array, "B K S"]:
        """Which slots stay; -inf marks slots that are not in use."""
        return highest(scores, budget)

    def survivors(self, state, chunk, rows, q) -> Bool[Array, "B K S"]:
        """Those of the highest scores."""
        scores = jnp.where(rows.live, self.scores(state, chunk, rows), -jnp.inf)
        return self.select(scores, self.layer_budget(chunk), chunk)

    def due(self, lengths: Int[Array, "B K"], chunk: Chunk) -> Bool[Array, " B"] | None:
        """Once the rows of the layer hold budget + interval tokens on average."""
        if self.cut_interval is None:
            return None
        total, heads = lengths.sum(1), lengths.shape[1]
        if chunk.static.head_axis is not None:
            total, heads = jax.lax.psum((total, heads), chunk.static.head_axis)
        return total >= heads * (self.layer_budget(chunk)[:, 0] + self.cut_interval)


@dataclasses.dataclass(frozen=True)
class Scorer(BudgetedPolicy, PeriodicEviction):
    """Base of policies that score the tokens of a row.

    Attributes:
      budget: tokens that a row keeps.
      compression_ratio: if given, the budget is (prompt + longest answer) / compression_ratio of
        each request instead.
      interval: tokens of an answer that are appended before rows are cut back to the budget; None
        to cut after the prompt alone.
    """

    interval: Interval = 512

    protected_by: ClassVar[str] = "by rule"  # the field that says how many

    def __post_init__(self):
        super().__post_init__()
        require(
            self.budget > self.protected,
            f"{self.name}: a budget of {self.budget} tokens holds nothing beside the "
            f"{self.protected} that always stay ({self.protected_by}); raise the budget.",
        )

    @property
    def least_budget(self) -> int:
        """One token beside those that always stay."""
        return self.protected + 1

    @property
    def cut_interval(self) -> int | None:
        """The interval."""
        return self.interval

    def layer_budget(self, chunk: Chunk) -> Int[Array, "B 1"]:
        """The same for every layer."""
        return self.budget_of(chunk)

    def footprint(self, tokens, *, page_size, group=1, compression_ratio=1) -> Footprint:
        """The budget, and what comes before the next cut."""
        budget = self.budget_for(tokens)
        return bounded(tokens, None if self.interval is None else budget + self.interval)
