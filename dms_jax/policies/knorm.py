"""Knorm (Devoto et al., arXiv 2406.11430): keys of small norm are attended to most.

    score_j = -|k_j|

Where a token occurs twice, its keys in the first layer differ by a rotation alone, and how that was
rounded should not decide between them: norms are compared in 12 bits, and of equals the most recent
stays.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dms_jax.policies.periodic_eviction import Scorer


@dataclasses.dataclass(frozen=True)
class Knorm(Scorer):
    """Keeps the keys of smallest norm.

    Attributes:
      budget, compression_ratio, interval: see `Scorer`.
    """

    def scores(self, state, chunk, rows) -> Float[Array, "B K S"]:
        """The norm, negated."""
        wide = jnp.promote_types(rows.k.dtype, jnp.float32)
        norm = jnp.linalg.norm(rows.k.astype(wide), axis=-1)
        return -jax.lax.reduce_precision(norm, exponent_bits=8, mantissa_bits=12)
