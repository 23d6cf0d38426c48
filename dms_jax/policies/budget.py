"""Budgets: the most tokens of a row, and the selection of the slots with the highest scores.

A budget is a number of tokens, or a fraction of the maximum length of a request (appendix G.1 of
the DMS paper, arXiv 2506.05345):

    budget = floor((prompt tokens + longest answer) / compression_ratio)

Programs take either as an argument (`Divisor` for the ratio), so one program serves every budget.
"""

import dataclasses
import math
from typing import Annotated, Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from dms_jax.checks import Range, Ratio, Traced
from dms_jax.policies.base import Policy
from dms_jax.policies.values import Chunk, Footprint, TracedInt

LONGEST = 2**23  # tokens; no sequence is longer, and times heads or layers it fits in int32


class Divisor(NamedTuple):
    """A compression ratio as an argument of programs.

    Attributes:
      ratio: the ratio, which programs do not use.
      part: UInt32[], 1 / ratio in units of 2**-31, rounded up.
    """

    ratio: Any
    part: Any

    @classmethod
    def of(cls, ratio: float | int) -> "Divisor":
        """Converts a ratio to an argument of programs."""
        return cls(float(ratio), np.uint32(_reciprocal(ratio)))

    @staticmethod
    def number(divisor: Any) -> Any:
        """Returns the ratio if it is a number, and the divisor itself inside programs."""
        if isinstance(divisor, Divisor) and isinstance(divisor.ratio, int | float):
            return divisor.ratio
        return divisor


Tokens = Annotated[int, Range(1, LONGEST), "Vanilla keeps everything"]
Budget = Annotated[Tokens, Traced(int)]
Sinks = Annotated[int, Range(0, LONGEST), Traced(int)]
BudgetRatio = Annotated[
    Ratio | None, "None is for a budget in tokens", Traced(Divisor.of, Divisor.number)
]


@dataclasses.dataclass(frozen=True)
class BudgetedPolicy(Policy):
    """Base of policies that keep a number of tokens.

    Attributes:
      budget: number of tokens that a row keeps, at most `LONGEST`.
      compression_ratio: if given, the budget is (prompt + longest answer) / compression_ratio of
        each request instead.
    """

    budget: Budget = 1024
    compression_ratio: BudgetRatio = dataclasses.field(default=None, kw_only=True)

    @property
    def least_budget(self) -> TracedInt:
        """Lower bound on a budget given as a compression ratio."""
        return 1

    def budget_of(self, chunk: Chunk) -> Int[Array, "B 1"]:
        """Returns the budget of each sequence of a chunk."""
        if self.compression_ratio is None:
            return jnp.full((chunk.lengths.shape[0], 1), self.budget, jnp.int32)
        return jnp.maximum(shares(chunk, self.compression_ratio), self.least_budget)

    def budget_for(self, tokens: int) -> int:
        """Returns the budget of sequences of at most `tokens` tokens."""
        if self.compression_ratio is None:
            return self.budget
        budget = max(share(tokens, self.compression_ratio), int(self.least_budget))
        return min(budget, LONGEST)

    def for_length(self, tokens: int) -> Policy:
        """Returns the same policy with a budget in tokens."""
        policy = super().for_length(tokens)
        if self.compression_ratio is None:
            return policy
        return dataclasses.replace(policy, budget=self.budget_for(tokens), compression_ratio=None)


Prefill = Literal["dense_then_evict", "evict_past_budget"]


@dataclasses.dataclass(frozen=True)
class EvictionByToken(BudgetedPolicy):
    """Base of policies that evict one token per step once the budget is full.

    Prompts are prefilled in one of two ways:

    * `prefill="dense_then_evict"`, the default, as in the authors' code of TOVA, H2O and
      StreamingLLM and in kvpress: a prompt gets full attention, each chunk in one pass, and one cut
      at its end reduces it to the budget and releases the freed pages. Until then the cache holds
      the whole prompt;
    * `prefill="evict_past_budget"`: the tokens of a prompt are treated like generated ones, as the
      DMS paper ran its baselines (arXiv 2506.05345, appendix G.1), and no row holds more than
      budget + 1 tokens. Prompt tokens within the budget run in one pass, without eviction; later
      ones run one by one, which takes many times as long.

    Attributes:
      prefill: dense_then_evict gives a prompt full attention and one cut at its end;
        evict_past_budget runs its tokens beyond the budget one by one, like those of an answer.
    """

    prefill: Prefill = dataclasses.field(default="dense_then_evict", kw_only=True)

    @property
    def shrinks(self) -> bool:
        """See `Policy.shrinks`: rows are cut after a dense prompt."""
        return self.prefill == "dense_then_evict"

    @property
    def parallel(self):
        """See `Policy.parallel`: dense prompts; otherwise each token evicts before the next one."""
        return "prompts" if self.shrinks else "never"

    def kept_whole(self, tokens: int) -> int:
        """See `Policy.kept_whole`: the budget."""
        return self.budget_for(tokens)


def shares(chunk: Chunk, compression_ratio: float | int | Divisor) -> Int[Array, "B 1"]:
    """Returns `share` of the maximum length of each sequence, exactly.

    The host reserves pages by `share`, so rounding here must be identical.
    """
    assert chunk.max_lengths is not None
    if not isinstance(compression_ratio, Divisor):
        compression_ratio = Divisor.of(compression_ratio)
    tokens, part = jnp.minimum(chunk.max_lengths, LONGEST), compression_ratio.part
    # The product of 24 and 32 bits, computed in halves of 12 and 16 bits, which fit int32.
    high, low = tokens >> 12, tokens & 0xFFF
    upper, lower = (jnp.int32(half) for half in (part >> 16, part & 0xFFFF))
    product = high * lower + ((low * lower) >> 12)  # in units of 2**12
    product = low * upper + (product >> 4)  # of 2**16
    product = high * upper + (product >> 12)  # of 2**28
    return (product >> 3)[:, None]


def share(tokens: int, compression_ratio: float | int) -> int:
    """Returns floor(tokens / compression_ratio), for at most `LONGEST` tokens.

    A quotient less than tokens / 2**31 below a whole number is rounded up, because a ratio such as
    2.7 is itself rounded.
    """
    return min(tokens, LONGEST) * _reciprocal(compression_ratio) >> 31


def _reciprocal(compression_ratio: float | int) -> int:
    """1 / compression_ratio in units of 2**-31, rounded up."""
    return math.ceil(2**31 / compression_ratio)


def bounded(tokens: int, limit: int | None) -> Footprint:
    """Returns the footprint of a row that grows up to a limit (None: none) and is read whole."""
    slots = tokens if limit is None else min(tokens, limit)
    return Footprint(slots, 0, limit, reads=slots, attended=slots)


def highest(scores: Float[Array, "B K S"], count: Int[Array, " B #K"]) -> Bool[Array, "B K S"]:
    """Marks the `count` highest scores of each row; ties go to the later ones.

    # scores: [3, 1, 3, 2]  count: 2  Out: [1, 0, 1, 0]
    """
    ascending = jnp.argsort(scores, axis=-1, stable=True)
    rank = jnp.argsort(ascending, axis=-1)
    return rank >= scores.shape[-1] - count[..., None]
