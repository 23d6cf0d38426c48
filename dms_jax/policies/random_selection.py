"""Random selection: the baseline for methods that score tokens.

The score of a token is a uniform number in [0, 1), drawn for every cut from a hash of the layer,
the KV head, the slot and the position of the cut. `RandomEviction` is its counterpart for methods
that decide token by token.
"""

import dataclasses
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dms_jax.checks import Seed, Traced
from dms_jax.policies.draws import mix, uniform
from dms_jax.policies.periodic_eviction import Scorer


@dataclasses.dataclass(frozen=True)
class RandomSelection(Scorer):
    """Keeps tokens at random.

    Attributes:
      budget, compression_ratio, interval: see `Scorer`.
      seed: random seed of the draws.
    """

    seed: Annotated[Seed, Traced(np.uint32)] = 0

    def draw(
        self, layer: Int[Array, ""], heads: Int[Array, " K"], newest: Int[Array, " B"], slots: int
    ) -> Float[Array, "B K S"]:
        """Returns the random numbers of a cut after the token at position `newest`."""
        seed = mix(jnp.uint32(self.seed) ^ mix(layer.astype(jnp.uint32) + 1))
        head = mix(seed + heads.astype(jnp.uint32))[:, None]
        when = mix(newest.astype(jnp.uint32) + jnp.uint32(0x9E3779B9))[:, None, None]
        return uniform(mix(mix(head ^ when) + jnp.arange(slots, dtype=jnp.uint32)))

    def scores(self, state, chunk, rows) -> Float[Array, "B K S"]:
        """Returns the random numbers of this cut."""
        heads = jnp.arange(rows.k.shape[1])
        if chunk.static.head_axis is not None:
            heads += len(heads) * jax.lax.axis_index(chunk.static.head_axis)
        return self.draw(chunk.tokens.layer, heads, chunk.newest, rows.k.shape[2])
