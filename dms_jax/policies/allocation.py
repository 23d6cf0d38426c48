"""Budgets that differ between layers or heads, around any scorer.

AdaKV (Feng et al., arXiv 2407.11550) ranks the tokens of all KV heads of a layer together: the
layer keeps K * budget tokens, whichever heads they are in, after each head was given its
alpha * budget best. Rows of a layer then differ in length, which costs nothing here: a row owns
the pages that it needs.

PyramidKV (Cai et al., arXiv 2406.02069) gives first layers more than last ones. Beside the w tokens
that a scorer always keeps, a budget b leaves b - w; with

    low = floor((b - w) / beta)     high = 2 (b - w) - low
    budget of layer l of L = w + floor(high - l (high - low) / (L - 1))

the mean over layers is at most b (the published code rounds the slope down instead, and keeps a
little more). What a short prompt leaves of the first layers' budgets is not given to the others.

The two compose: AdaKV(PyramidKV(SnapKV(budget=512))).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dms_jax.checks import Count, Share, require, show
from dms_jax.policies.base import Chunk, Policy, PolicyState
from dms_jax.policies.budget import highest
from dms_jax.policies.scored import Scored
from dms_jax.policies.snapkv import SnapKV


@dataclasses.dataclass(frozen=True)
class Allocation(Scored):
    """Base of policies that spend the budget of another one.

    Attributes:
      scorer: which says what a token is worth, how many stay, and when rows are cut.
    """

    scorer: Policy = dataclasses.field(default=SnapKV())

    remembers = True

    def __post_init__(self):
        require(
            isinstance(self.scorer, Scored),
            f"{self.name}: scorer={show(self.scorer)} does not score what rows hold; give SnapKV, "
            "Knorm, KeyDiff, ExpectedAttention, RandomSelection, or another allocation of one.",
        )
        super().__post_init__()

    @property
    def _scored(self) -> Scored:
        assert isinstance(self.scorer, Scored)
        return self.scorer

    # -- handed to the scorer ---------------------------------------------------------------------

    @property
    def cut_interval(self) -> int | None:
        """That of the scorer."""
        return self._scored.cut_interval

    @property
    def protected(self) -> int:
        """Those of the scorer."""
        return self._scored.protected

    @property
    def future_positions(self) -> int:
        """Those of the scorer."""
        return self.scorer.future_positions

    def mean_slot_limit(self, page_size: int) -> int | None:
        """That of the scorer, whose budget is spent otherwise but not exceeded."""
        return self.scorer.mean_slot_limit(page_size)

    def for_horizon(self, tokens: int) -> Policy:
        """Around a scorer with a budget in tokens."""
        scorer = self.scorer.for_horizon(tokens)
        return self if scorer is self.scorer else dataclasses.replace(self, scorer=scorer)

    def init_row_state(self, num_sequences, num_kv_heads, group, head_dim, dtype) -> Any:
        """That of the scorer."""
        return self.scorer.init_row_state(num_sequences, num_kv_heads, group, head_dim, dtype)

    def init_pages(self, num_pages, page_size, head_dim, dtype) -> Any:
        """That of the scorer."""
        return self.scorer.init_pages(num_pages, page_size, head_dim, dtype)

    def remember(self, state: PolicyState, q, chunk: Chunk) -> PolicyState:
        """As the scorer."""
        return self.scorer.remember(state, q, chunk)

    def layer_budget(self, chunk: Chunk) -> Int[Array, "B 1"]:
        """That of the scorer."""
        return self._scored.layer_budget(chunk)

    def worth(self, state, rows, chunk, scale, head_axis) -> Float[Array, "B K S"]:
        """As the scorer."""
        return self._scored.worth(state, rows, chunk, scale, head_axis)

    def select(self, worth, budget, head_axis) -> Bool[Array, "B K S"]:
        """As the scorer."""
        return self._scored.select(worth, budget, head_axis)

    # -- as data ----------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """As `Policy.to_dict`, with the scorer by its name."""
        return super().to_dict() | {"scorer": self.scorer.to_dict()}

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Policy:
        """As `Policy.from_fields`."""
        from dms_jax.policies import from_dict  # the registry knows this class too

        if isinstance(fields.get("scorer"), dict):
            fields = fields | {"scorer": from_dict(fields["scorer"])}
        return super().from_fields(fields)


@dataclasses.dataclass(frozen=True)
class AdaKV(Allocation):
    """Lets the heads of a layer compete for the layer's budget.

    Attributes:
      scorer: whose scores are compared.
      alpha: share of the budget that every head has for itself.
    """

    alpha: Share = 0.2

    def select(self, worth, budget, head_axis) -> Bool[Array, "B K S"]:
        """The best of all heads together, after each head's own."""
        safe = jnp.floor(self.alpha * budget * (1 + 1e-6)).astype(jnp.int32)
        worth = jnp.where(highest(worth, safe) & (worth > -jnp.inf), jnp.inf, worth)
        num_kv_heads = worth.shape[1]
        if head_axis is not None:
            worth = jax.lax.all_gather(worth, head_axis, axis=1, tiled=True)
        batch, heads, slots = worth.shape
        keep = highest(worth.reshape(batch, 1, heads * slots), heads * budget).reshape(worth.shape)
        if head_axis is not None:
            first = jax.lax.axis_index(head_axis) * num_kv_heads
            keep = jax.lax.dynamic_slice_in_dim(keep, first, num_kv_heads, axis=1)
        return keep


@dataclasses.dataclass(frozen=True)
class PyramidKV(Allocation):
    """Gives first layers more of the budget than last ones.

    Attributes:
      scorer: whose budget is spread over the layers.
      beta: the last layer has the beta-th part of the budget; higher is steeper.
    """

    beta: Count = 20

    def layer_budget(self, chunk: Chunk) -> Int[Array, "B 1"]:
        """Linear in the layer's number."""
        budget = self._scored.layer_budget(chunk)
        if chunk.num_layers == 1:
            return budget
        beside = budget - self.protected
        low = beside // self.beta
        high = 2 * beside - low
        assert chunk.layer is not None
        fall = -(-chunk.layer * (high - low) // (chunk.num_layers - 1))
        return jnp.maximum(self.protected + high - fall, 1)

    def slot_limit(self, page_size: int) -> int | None:
        """That of the first layer."""
        limit = self.scorer.slot_limit(page_size)
        if limit is None or self.cut_interval is None:
            return None
        return 2 * (limit - self.cut_interval) + self.cut_interval
