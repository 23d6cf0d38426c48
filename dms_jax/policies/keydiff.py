"""KeyDiff (Park et al., arXiv 2504.15364): keys that differ from the mean key are important.

    score_j = -cos(k_j, mean_i k_i / |k_i|)

over the rotated keys of the row.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from dms_jax.policies.periodic_eviction import Scorer


@dataclasses.dataclass(frozen=True)
class KeyDiff(Scorer):
    """Keeps the keys with the lowest cosine similarity to the mean key.

    Attributes:
      budget, compression_ratio, interval: see `Scorer`.
    """

    def scores(self, state, chunk, rows) -> Float[Array, "B K S"]:
        """Returns the negative cosine similarity to the mean direction."""
        wide = jnp.promote_types(rows.k.dtype, jnp.float32)
        keys = rows.k.astype(wide)  # zeros beyond the length
        tiny = jnp.finfo(wide).tiny
        unit = keys / jnp.maximum(jnp.linalg.norm(keys, axis=-1, keepdims=True), tiny)
        anchor = unit.sum(2, keepdims=True) / jnp.maximum(rows.lengths, 1)[..., None, None]
        anchor /= jnp.maximum(jnp.linalg.norm(anchor, axis=-1, keepdims=True), tiny)
        return -(unit * anchor).sum(-1)
