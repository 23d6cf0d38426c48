"""TOVA (Oren et al., arXiv 2401.06104): token omission via attention.

Beyond the budget, after each query the token with the smallest attention weight is dropped,
whichever it is (no sinks, no window: the newest may go). The weight is that of the last query,
averaged over all query heads of the layer, so all heads of a layer drop the same token;
`per="head"` averages over each KV head's own group instead.

The query attends to budget + 1 tokens, then one goes. After a dense prompt the cut is made by the
weights of the prompt's last query.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dms_jax.policies.victims import VictimEviction


@dataclasses.dataclass(frozen=True)
class TOVA(VictimEviction):
    """Drops the token that the last query attended to least.

    Attributes:
      budget, compression_ratio, prefill: see `VictimEviction`.
      per: average the weights over the layer, or over each KV head's group.
    """

    per: Literal["layer", "head"] = "layer"

    def scores(self, state, chunk, weights) -> Float[Array, "B K S"]:
        """The mean weight."""
        mean = weights.mean(2)
        if self.per == "layer":
            mean = jnp.broadcast_to(mean.mean(1, keepdims=True), mean.shape)
            if chunk.static.head_axis is not None:
                mean = jax.lax.pmean(mean, chunk.static.head_axis)
        return mean
