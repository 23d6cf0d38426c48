"""Policies that select reads, on top of a policy that decides which tokens are kept.

Selection and eviction are independent, so they compose: `Quest(over=DMS(...))` lets DMS evict
tokens and selects pages among the kept ones, `KCache(over=DMS(...))` fetches values of kept tokens
only. Decisions and writes are delegated to `over`, which must decide from the tokens themselves
(Vanilla, DMS, DMC, StreamingLLM, RandomEviction), because tokens that are not read have no
attention weights.
"""

import dataclasses

from dms_jax.checks import require, show
from dms_jax.policies.base import Policy, delegate
from dms_jax.policies.delayed_eviction import DelayedEviction
from dms_jax.policies.values import Retrofit
from dms_jax.policies.vanilla import Vanilla


@delegate(
    *("over", "appends", "visible_window", "footprint", "decide", "borrowed", "init_state"),
    *("merge", "frozen_slots", "write", "written", "evicted"),
)
@dataclasses.dataclass(frozen=True)
class SelectiveReading(Policy):
    """Base of policies that read less than the cache holds. Prompts get full attention.

    Attributes:
      over: the policy that decides which tokens the cache holds.
    """

    over: Policy = dataclasses.field(default=Vanilla(), kw_only=True)

    def __post_init__(self):
        require(
            isinstance(self.over, Vanilla | DelayedEviction) and self.over.parallel == "always",
            f"{self.name}: over={show(self.over)} decides by attention, which is unknown for "
            "unread tokens; give a policy that decides from the tokens alone (Vanilla, DMS, DMC, "
            "StreamingLLM with a budget in tokens, RandomEviction).",
        )
        super().__post_init__()

    @property
    def parallel(self):
        """See `Policy.parallel`: prompts get full attention."""
        return "prompts"

    @property
    def retrofit(self) -> Retrofit:
        """The training of `over`; models are trained with `over` alone."""
        return dataclasses.replace(self.over.retrofit, possible=False)
