"""Policies that change only what is read, over any policy that says who stays.

Reading and keeping are separate questions, so they compose: `Quest(over=DMS(...))` lets DMS decide
which tokens survive and selects pages among those, `KCache(over=DMS(...))` fetches values of
survivors alone. Everything about deciding and writing is handed to `over`; it must decide from the
tokens themselves (plain, DMS, DMC, StreamingLLM, random), because attention weights are not known
for what is not read.
"""

import dataclasses

from jaxtyping import Array, Bool, Float

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
    """Base of policies that read less than the cache holds. Prompts are read whole.

    Attributes:
      over: the policy that decides what the cache holds.
    """

    over: Policy = dataclasses.field(default=Vanilla(), kw_only=True)

    def __post_init__(self):
        require(
            isinstance(self.over, Vanilla | DelayedEviction) and self.over.parallel == "always",
            f"{self.name}: over={show(self.over)} decides by attention, which is not known for "
            "what is not read; give a policy whose tokens decide for themselves (Vanilla, DMS, "
            "DMC, StreamingLLM with a budget in tokens, RandomEviction).",
        )
        super().__post_init__()

    @property
    def parallel(self):
        """Prompts are read whole."""
        return "prompts"

    # -- handed to `over` -------------------------------------------------------------------------

    @property
    def retrofit(self) -> Retrofit:
        """What `over` needs; a model is trained with `over` itself."""
        return dataclasses.replace(self.over.retrofit, possible=False)

    @property
    def visible_window(self) -> int:
        """The window of `over`."""
        return self.over.visible_window

    def footprint(self, tokens, **options) -> Footprint:
        """That of `over`."""
        return self.over.footprint(tokens, **options)

    def decide(self, tokens: Tokens) -> Decisions:
        """Decides as `over`."""
        return self.over.decide(tokens)

    def clear_borrowed(self, q: Float[Array, "B T H D"], k: Float[Array, "B T K D"], scale=0.0):
        """Clears the neurons of `over`."""
        return self.over.clear_borrowed(q, k, scale)

    def init_state(self, shape: CacheShape) -> PolicyState:
        """The state of `over`."""
        return self.over.init_state(shape)

    def merge(self, state: PolicyState, chunk: Chunk) -> tuple[PolicyState, Chunk]:
        """Rewrites keys and values as `over`."""
        return self.over.merge(state, chunk)

    def write(self, state: PolicyState, chunk: Chunk) -> tuple[PolicyState, Placement]:
        """Places tokens as `over`."""
        return self.over.write(state, chunk)

    def written(self, state, chunk, placement, pool) -> PolicyState:
        """Handed to `over`."""
        return self.over.written(state, chunk, placement, pool)

    def evicted(self, chunk: Chunk) -> Bool[Array, "B K T"]:
        """Evicts as `over`."""
        return self.over.evicted(chunk)
