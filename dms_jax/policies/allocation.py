"""Budgets that differ between layers or heads, around any scorer.

AdaKV (Feng et al., arXiv 2407.11550) ranks the tokens of all KV heads of a layer together: the
layer keeps K * budget tokens in any heads, with a part of the budget guaranteed to each head. Rows
of a layer then differ in length, which costs nothing here, because a row owns only the pages that
it needs. As in kvpress, the floor(alpha b) best tokens of a head stay before the others compete for
the rest, and KV heads are scored, not query heads. The tokens that a scorer always keeps score
highest and use up that guarantee: with SnapKV's window of 64 and alpha 0.2 nothing more is
guaranteed up to a budget of 320.

PyramidKV (Cai et al., arXiv 2406.02069) gives early layers more than late ones. Without the w
tokens that a scorer always keeps, a budget b leaves b - w; with

    low = floor((b - w) / beta)     high = 2 (b - w) - low
    budget of layer l of L = w + floor(high - l (high - low) / (L - 1))

the mean over layers is at most b (the published code rounds the slope down instead, and keeps a
little more). If fewer tokens were seen than an early layer's budget, a part of the budget is
unused: 6% with b = 2048 and 3,000 tokens in 32 layers.

The two compose: AdaKV(PyramidKV(SnapKV(budget=512))).
"""

import dataclasses
from typing import Annotated

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dms_jax.checks import CountOnDevice, Share, Traced, require, show
from dms_jax.policies.base import Policy, delegate
from dms_jax.policies.budget import highest
from dms_jax.policies.periodic_eviction import AnswerEviction, PeriodicEviction
from dms_jax.policies.snapkv import SnapKV
from dms_jax.policies.values import Chunk, Footprint


@delegate(
    *("scorer", "cut_interval", "protected", "footprint", "init_state", "written", "observe"),
    *("layer_budget", "scores", "select"),
)
@dataclasses.dataclass(frozen=True)
class Allocation(PeriodicEviction):
    """Base of policies that distribute the budget of another policy.

    Attributes:
      scorer: the policy that scores the tokens, and sets the budget and the time of cuts.
    """

    scorer: Policy = dataclasses.field(default=SnapKV())

    def __post_init__(self):
        require(
            isinstance(self.scorer, PeriodicEviction)
            and not isinstance(self.scorer, AnswerEviction),
            f"{self.name}: scorer={show(self.scorer)} does not score a row's tokens at the "
            "end of a prompt; give SnapKV, Knorm, KeyDiff, ExpectedAttention, RandomSelection, or "
            "another allocation of one.",
        )
        super().__post_init__()

    def for_length(self, tokens: int) -> Policy:
        """Returns the same allocation around a scorer with a budget in tokens."""
        scorer = self.scorer.for_length(tokens)
        return self if scorer is self.scorer else dataclasses.replace(self, scorer=scorer)


@dataclasses.dataclass(frozen=True)
class AdaKV(Allocation):
    """Lets the heads of a layer compete for the layer's budget.

    Feng et al., arXiv 2407.11550.

    Attributes:
      scorer: the policy whose scores are compared across heads.
      alpha: fraction of the budget guaranteed to each head, including the tokens that the scorer
        always keeps.
    """

    alpha: Annotated[Share, Traced(float)] = 0.2

    def footprint(self, tokens, **options) -> Footprint:
        """Returns the scorer's footprint without a bound: one head may take most of its layer's."""
        return dataclasses.replace(super().footprint(tokens, **options), at_most=None)

    def select(self, scores, budget, chunk) -> Bool[Array, "B K S"]:
        """Keeps each head's guaranteed tokens, and the highest scores of all heads together."""
        own = jnp.floor(self.alpha * budget * (1 + 1e-6)).astype(jnp.int32)
        scores = jnp.where(highest(scores, own) & (scores > -jnp.inf), jnp.inf, scores)
        return self._highest_of_all_heads(scores, budget, chunk)

    def _highest_of_all_heads(
        self, scores: Float[Array, "B K S"], budget: Int[Array, "B 1"], chunk: Chunk
    ) -> Bool[Array, "B K S"]:
        """Marks the highest scores of all heads together, `budget` tokens per head on average."""
        num_kv_heads, head_axis = scores.shape[1], chunk.static.head_axis
        if head_axis is not None:
            scores = jax.lax.all_gather(scores, head_axis, axis=1, tiled=True)
        batch, heads, slots = scores.shape
        keep = highest(scores.reshape(batch, 1, heads * slots), heads * budget)
        keep = keep.reshape(scores.shape)
        if head_axis is not None:
            first = jax.lax.axis_index(head_axis) * num_kv_heads
            keep = jax.lax.dynamic_slice_in_dim(keep, first, num_kv_heads, axis=1)
        return keep


@dataclasses.dataclass(frozen=True)
class PyramidKV(Allocation):
    """Gives early layers more of the budget than late ones.

    Cai et al., arXiv 2406.02069.

    Attributes:
      scorer: the policy whose budget is distributed over the layers.
      beta: the last layer gets 1 / beta of the budget; higher is steeper.
    """

    beta: Annotated[CountOnDevice, Traced(int)] = 20

    def layer_budget(self, chunk: Chunk) -> Int[Array, "B 1"]:
        """Returns a budget that falls linearly with the layer's index."""
        budget, num_layers = super().layer_budget(chunk), chunk.static.num_layers
        if num_layers == 1:
            return budget
        beside = budget - self.protected
        low = beside // self.beta
        high = 2 * beside - low
        fall = -(-chunk.tokens.layer * (high - low) // (num_layers - 1))
        return jnp.maximum(self.protected + high - fall, 1)

    def footprint(self, tokens, **options) -> Footprint:
        """Returns the scorer's footprint on average, bounded by that of the first layer."""
        found = super().footprint(tokens, **options)
        if found.at_most is None or self.cut_interval is None:
            return found
        first_layer = 2 * (found.at_most - self.cut_interval) + self.cut_interval
        return dataclasses.replace(found, at_most=first_layer)
