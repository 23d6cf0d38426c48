"""Fixed memory pooling: the baseline for DMC's learned decisions (arXiv 2403.09636, appendix E).

Every n tokens from the start of the sequence are averaged into one slot:

    alpha_t = 1[t mod n > 0],   omega_t = 1

The model adapts to the pooling but learns no decisions, so it borrows no neuron, and training
equals inference. The compression ratio is n from the first step on.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from dms_jax.checks import Count
from dms_jax.policies.base import hard_marks
from dms_jax.policies.merging import Merging, partial_means
from dms_jax.policies.values import Chunk, Decisions, Footprint, Relaxed, Tokens


@dataclasses.dataclass(frozen=True)
class FixedPooling(Merging):
    """Averages a fixed number of neighbouring tokens.

    Attributes:
      every: number of tokens averaged into one slot, equal to the compression ratio.
    """

    every: Count = 4

    @property
    def merge_window(self) -> int | None:
        """See `Merging.merge_window`: the whole segment, which has a fixed length."""
        return self.every

    def footprint(self, tokens, *, page_size, group=1, compression_ratio=1) -> Footprint:
        """Returns one slot for every n tokens."""
        slots = -(-tokens // self.every)
        return Footprint(slots, slots, None, reads=slots, attended=slots)

    def decide(self, tokens: Tokens) -> Decisions:
        """Marks all positions but multiples of n for merging, with equal importance."""
        shape = (*tokens.k.shape[:1], *tokens.k.shape[2:0:-1])  # [B, K, T]
        joins = (tokens.positions % self.every > 0)[:, None]
        wide = jnp.promote_types(tokens.k.dtype, jnp.float32)
        return Decisions(marks=jnp.broadcast_to(joins, shape), importance=jnp.ones(shape, wide))

    def relax(self, chunk: Chunk, noise: Float[Array, "B K T"]) -> Relaxed:
        """Returns the form used at inference: the decisions are constants."""
        decisions = chunk.decisions
        assert decisions.importance is not None
        joins = hard_marks(decisions)
        alpha = joins.astype(decisions.importance.dtype)
        k, v = partial_means(
            chunk.tokens.k, chunk.tokens.v, alpha, decisions.importance, self.merge_window
        )
        bias = jnp.where(self.evicted(chunk), -jnp.inf, jnp.zeros((), noise.dtype))
        return Relaxed(k=k, v=v, bias=bias, decisions=alpha)
