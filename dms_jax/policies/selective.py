"""Policies that select reads, on top of a policy that decides which tokens are kept.

Selection and eviction are independent, so they compose: `Quest(over=DMS(...))` lets DMS evict
tokens and selects pages among the kept ones, `KCache(over=DMS(...))` fetches values of kept tokens
only. Decisions and writes are delegated to `over`, which must decide from the tokens themselves
(Vanilla, DMS, DMC, StreamingLLM, RandomEviction), because tokens that are not read have no
attention weights.
"""

import dataclasses

from jaxtyping import Array, Bool

from dms_jax.checks import require, show
from dms_jax.policies.base import Policy
from dms_jax.policies.delayed_eviction import DelayedEviction
from dms_jax.policies.values import (
    CacheShape,
    Chunk,
    Decisions,
    Footprint,
    Placement,
    PolicyState,
    Retrofit,
    Tokens,
)
from dms_jax.policies.vanilla import Vanilla


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

    # -- handed to `over` -------------------------------------------------------------------------

    @property
    def appends(self) -> bool:
        """See `Policy.appends`; handed to `over`."""
        return self.over.appends

    @property
    def retrofit(self) -> Retrofit:
        """The training of `over`; models are trained with `over` alone."""
        return dataclasses.replace(self.over.retrofit, possible=False)

    @property
    def visible_window(self) -> int:
        """See `Policy.visible_window`; handed to `over`."""
        return self.over.visible_window

    def footprint(self, tokens, **options) -> Footprint:
        """See `Policy.footprint`; handed to `over`."""
        return self.over.footprint(tokens, **options)

    def decide(self, tokens: Tokens) -> Decisions:
        """See `Policy.decide`; handed to `over`."""
        return self.over.decide(tokens)

    def borrowed(self, group: int, head_dim: int):
        """See `Policy.borrowed`; handed to `over`."""
        return self.over.borrowed(group, head_dim)

    def init_state(self, shape: CacheShape) -> PolicyState:
        """See `Policy.init_state`; handed to `over`."""
        return self.over.init_state(shape)

    def merge(self, state: PolicyState, chunk: Chunk) -> tuple[PolicyState, Chunk]:
        """See `Policy.merge`; handed to `over`."""
        return self.over.merge(state, chunk)

    def write(self, state: PolicyState, chunk: Chunk) -> tuple[PolicyState, Placement]:
        """See `Policy.write`; handed to `over`."""
        return self.over.write(state, chunk)

    def written(self, state, chunk, placement, pool) -> PolicyState:
        """See `Policy.written`; handed to `over`."""
        return self.over.written(state, chunk, placement, pool)

    def evicted(self, chunk: Chunk) -> Bool[Array, "B K T"]:
        """See `Policy.evicted`; handed to `over`."""
        return self.over.evicted(chunk)
