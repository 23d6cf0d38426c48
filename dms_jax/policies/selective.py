"""Policies that change only what is read, over any policy that says who stays.

Reading and keeping are separate questions, so they compose: `Quest(over=DMS(...))` lets DMS decide
which tokens survive and selects pages among those, `KCache(over=DMS(...))` fetches values of
survivors alone. Everything about deciding and writing is handed to `over`; it must decide from the
tokens themselves (plain, DMS, DMC, StreamingLLM, random), because attention weights are not known
for what is not read.
"""

import dataclasses
from typing import Any

from jaxtyping import Array, Bool, Float

from dms_jax.checks import require, show
from dms_jax.policies.base import Chunk, Decisions, Placement, Policy, PolicyState
from dms_jax.policies.delayed_eviction import DelayedEviction
from dms_jax.policies.vanilla import Vanilla


@dataclasses.dataclass(frozen=True)
class SelectiveReading(Policy):
    """Base of policies that read less than the cache holds. Prompts are read whole.

    Attributes:
      over: the policy that decides what the cache holds.
    """

    over: Policy = dataclasses.field(default=Vanilla(), kw_only=True)

    split_invariant = False

    def __post_init__(self):
        require(
            isinstance(self.over, Vanilla | DelayedEviction) and self.over.parallel(prompt=True),
            f"{self.name}: over={show(self.over)} decides by attention, which is not known for "
            "what is not read; give a policy whose tokens decide for themselves (Vanilla, DMS, "
            "DMC, StreamingLLM with a budget in tokens, RandomEviction).",
        )
        super().__post_init__()

    def parallel(self, *, prompt: bool) -> bool:
        """The prompt is dense."""
        return prompt

    # -- handed to `over` -------------------------------------------------------------------------

    @property
    def uses_adapter(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether `over` reads an adapter."""
        return self.over.uses_adapter

    @property
    def learned(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether `over` is learned."""
        return self.over.learned

    @property
    def visible_window(self) -> int:
        """The window of `over`."""
        return self.over.visible_window

    @property
    def borrowed_neurons(self) -> str | None:
        """The neurons of `over`."""
        return self.over.borrowed_neurons

    @property
    def trained_decisions(self) -> str | None:
        """Those of `over`."""
        return self.over.trained_decisions

    def validate(self, *, num_layers: int, num_heads: int, num_kv_heads: int, head_dim: int):
        """Raises ConfigError if `over` cannot serve a model of this shape."""
        self.over.validate(
            num_layers=num_layers, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim
        )

    def slot_limit(self, page_size: int) -> int | None:
        """The limit of `over`."""
        return self.over.slot_limit(page_size)

    def decide(self, projections) -> Decisions:
        """Decides as `over`."""
        return self.over.decide(projections)

    def clear_borrowed(self, q: Float[Array, "B T H D"], k: Float[Array, "B T K D"], scale=0.0):
        """Clears the neurons of `over`."""
        return self.over.clear_borrowed(q, k, scale)

    def init_rows(self, num_sequences, num_kv_heads, head_dim, dtype) -> Any:
        """The row state of `over`."""
        return self.over.init_rows(num_sequences, num_kv_heads, head_dim, dtype)

    def transform(self, state: PolicyState, chunk: Chunk) -> tuple[PolicyState, Chunk]:
        """Rewrites keys and values as `over`."""
        return self.over.transform(state, chunk)

    def write(self, state: PolicyState, chunk: Chunk) -> tuple[PolicyState, Placement]:
        """Places tokens as `over`."""
        return self.over.write(state, chunk)

    def evicted(self, chunk: Chunk) -> Bool[Array, "B K T"]:
        """Evicts as `over`."""
        return self.over.evicted(chunk)

    # -- as data ----------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """As `Policy.to_dict`, with `over` by its name."""
        return super().to_dict() | {"over": self.over.to_dict()}

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Policy:
        """As `Policy.from_fields`."""
        from dms_jax.policies import from_dict  # the registry knows this class too

        if isinstance(fields.get("over"), dict):
            fields = fields | {"over": from_dict(fields["over"])}
        return super().from_fields(fields)
