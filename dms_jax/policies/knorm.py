"""Knorm (Devoto et al., arXiv 2406.11430): keys of small norm receive the most attention.

    score_j = -|k_j|

If a token occurs twice, its keys in the first layer differ only by a rotation, whose rounding
should not decide which one is kept. So norms are compared in 12 bits, and ties keep the most recent
token.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dms_jax.policies.periodic_eviction import Scorer


@dataclasses.dataclass(frozen=True)
class Knorm(Scorer):
    """Keeps the keys with the smallest norm.

    Attributes:
      budget, compression_ratio, interval: see `Scorer`.
    """

    def scores(self, state, chunk, rows) -> Float[Array, "B K S"]:
        """Returns the negative norm of each key."""
        wide = jnp.promote_types(rows.k.dtype, jnp.float32)
        norm = jnp.linalg.norm(rows.k.astype(wide), axis=-1)
        return -jax.lax.reduce_precision(norm, exponent_bits=8, mantissa_bits=12)
