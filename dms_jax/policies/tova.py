"""TOVA (Oren et al., arXiv 2401.06104): token omission via attention.

Beyond the budget, each query evicts the token with the smallest attention weight (no sinks and no
window: even the newest token may be evicted). The weight is that of the last query, averaged over
all query heads of the layer, so all heads of a layer evict the same token; `per="head"` averages
over each KV head's own group instead.

The query attends to budget + 1 tokens, then one is evicted. After a dense prompt the rows are cut
by the weights of the prompt's last query.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dms_jax.policies.victims import VictimEviction


@dataclasses.dataclass(frozen=True)
class TOVA(VictimEviction):
    """Evicts the token that the last query attended to least.

    Attributes:
      budget, compression_ratio, prefill: see `VictimEviction`.
      per: whether weights are averaged over the layer, or over each KV head's group.
    """

    per: Literal["layer", "head"] = "layer"

    def scores(self, state, chunk, weights) -> Float[Array, "B K S"]:
        """Returns the mean attention weight of each slot."""
        mean = weights.mean(2)
        if self.per == "layer":
            mean = jnp.broadcast_to(mean.mean(1, keepdims=True), mean.shape)
            if chunk.static.head_axis is not None:
                mean = jax.lax.pmean(mean, chunk.static.head_axis)
        return mean
