"""StreamingLLM (Xiao et al., arXiv 2309.17453): the first tokens and the most recent ones.

A query at position i sees key j iff j < sinks (the attention sinks) or j is among the last
`budget - sinks` tokens, itself included. Rotations keep the true positions.
"""

import dataclasses

import jax.numpy as jnp

from dms_jax.checks import Count, Whole, require
from dms_jax.policies.base import Decisions, Projections
from dms_jax.policies.delayed_eviction import DelayedEviction


@dataclasses.dataclass(frozen=True)
class StreamingLLM(DelayedEviction):
    """Attention sinks and a recent window.

    Attributes:
      budget: live tokens per row, the current one included.
      sinks: first tokens that are never evicted.
    """

    budget: Count = 1024
    sinks: Whole = 4

    def __post_init__(self):
        super().__post_init__()
        require(
            self.budget > self.sinks,
            f"StreamingLLM: a budget of {self.budget} tokens holds nothing beside {self.sinks} "
            "sinks; raise the budget.",
        )

    @property
    def visible_window(self) -> int:
        """The recent tokens, without the current one."""
        return self.budget - self.sinks - 1

    def slot_limit(self, page_size: int) -> int:
        """Never more than the budget."""
        del page_size
        return self.budget

    def decide(self, projections: Projections) -> Decisions:
        """Everything but the sinks leaves with the window."""
        batch, num_tokens = projections.positions.shape
        shape = (batch, projections.k.shape[2], num_tokens)
        marks = (projections.positions >= self.sinks)[:, None]
        return Decisions(marks=jnp.broadcast_to(marks, shape))
