"""Scores of what a row holds, and cuts back to a budget.

The standard methods that need no training differ in one function: what a token in the cache is
worth. The rest is the same, and is here. A prompt attends to all of itself, a chunk in one pass;
after its last token each row is cut to the `budget` tokens that are worth most. From then on tokens
are appended, and whenever the rows of a layer hold budget + interval tokens on average, they are
cut back after the attention of that step (a budget of 2048 and an interval of 512 is the published
decoding of kvpress). Tokens that stay keep their order, so the last slots of a row are always the
most recent tokens, and the pages behind the cut are given back.
"""

import dataclasses
from typing import Annotated, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dms_jax.checks import Range, require
from dms_jax.policies.base import Chunk, Policy, PolicyState, Rows
from dms_jax.policies.budget import LONGEST, BudgetedPolicy, highest

Interval = Annotated[
    Annotated[int, Range(1, LONGEST)] | None, "give None to cut after the prompt alone"
]


@dataclasses.dataclass(frozen=True)
class Scored(Policy):
    """What policies that cut rows by scores have in common."""

    split_invariant = False

    @property
    def shrinks(self) -> bool:
        """After the prompt, and while answering."""
        return True

    def parallel(self, *, prompt: bool) -> bool:
        """Prompts in one pass; answers token by token, for a cut may come between two."""
        return prompt

    @property
    def cut_interval(self) -> int | None:
        """Tokens that are appended between two cuts; None for no cut but that after a prompt."""
        raise NotImplementedError

    @property
    def protected(self) -> int:
        """Tokens of a row that always stay, because `worth` says so."""
        return 0

    def layer_budget(self, chunk: Chunk) -> Int[Array, "B 1"]:
        """Tokens that a row of this layer keeps, on average over the layer's rows."""
        raise NotImplementedError

    def worth(
        self,
        state: PolicyState,
        rows: Rows,
        chunk: Chunk,
        scale: float,
        head_axis: str | None,
    ) -> Float[Array, "B K S"]:
        """What each slot is worth; inf for those that stay whatever else does.

        Args:
          state: what the policy remembers.
          rows: what the cache holds, the chunk included.
          chunk: the tokens that came last.
          scale: factor on the dot products.
          head_axis: mesh axis over which the KV heads are split, if any.
        """
        raise NotImplementedError

    def select(
        self,
        worth: Float[Array, "B K S"],
        budget: Int[Array, "B 1"],
        head_axis: str | None,
    ) -> Bool[Array, "B K S"]:
        """Which slots stay; -inf marks slots that are not in use."""
        del head_axis
        return highest(worth, budget)

    def survivors(self, state, q, rows, chunk, scale, head_axis) -> Bool[Array, "B K S"]:
        """Those that are worth most."""
        del q
        worth = self.worth(state, rows, chunk, scale, head_axis)
        worth = jnp.where(rows.live, worth, -jnp.inf)
        return self.select(worth, self.layer_budget(chunk), head_axis)

    def due(
        self, lengths: Int[Array, "B K"], chunk: Chunk, head_axis: str | None
    ) -> Bool[Array, " B"] | None:
        """Once the rows of the layer hold budget + interval tokens on average."""
        if self.cut_interval is None:
            return None
        total, heads = lengths.sum(1), lengths.shape[1]
        if head_axis is not None:
            total, heads = jax.lax.psum((total, heads), head_axis)
        return total >= heads * (self.layer_budget(chunk)[:, 0] + self.cut_interval)


@dataclasses.dataclass(frozen=True)
class Scorer(BudgetedPolicy, Scored):
    """Base of policies that say what a token is worth.

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

    def slot_limit(self, page_size: int) -> int | None:
        """The budget, and what comes before the next cut."""
        del page_size
        if self.compression_ratio is not None or self.interval is None:
            return None
        return self.budget + self.interval
