"""SnapKV (Li et al., arXiv 2404.14469): the tokens that the most recent queries attended to.

    w_j     = mean over the last `window` queries i of softmax(q_i K / sqrt(d))_j
    score_j = mean over the group of mean over |n| <= kernel / 2 of w_{j + n}

for the tokens before the window, with zeros beyond both ends; the window itself is always kept. A
question at the end of the prompt influences the kept tokens if it lies in the window.

The state holds the last `window` queries of every head, and takes as much memory as
window * group / 2 tokens of a row.
"""

import dataclasses
import math
from typing import Annotated

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dms_jax.checks import Count, Range, require
from dms_jax.policies.periodic_eviction import Scorer
from dms_jax.policies.recent_queries import empty_ring, remember
from dms_jax.policies.values import CacheShape, Chunk, PolicyState, Rows
from pallas_kernels.received import received_attention, received_weights

WIDEST_KERNEL = 255  # tokens; the paper uses 5 to 63, and each one costs a pass over the scores


@dataclasses.dataclass(frozen=True)
class SnapKV(Scorer):
    """Keeps a window of recent tokens, and the tokens to which the window's queries attended most.

    Attributes:
      budget, compression_ratio, interval: see `Scorer`.
      window: number of recent queries that vote; their tokens are kept.
      kernel: number of tokens over which votes are averaged, odd and at most `WIDEST_KERNEL`.
    """

    window: Count = 64
    kernel: Annotated[int, Range(1, WIDEST_KERNEL)] = 5

    protected_by = "window"

    def __post_init__(self):
        super().__post_init__()
        require(self.kernel % 2 == 1, f"SnapKV: kernel must be an odd number, got {self.kernel}.")

    @property
    def protected(self) -> int:
        """See `PeriodicEviction.protected`: the window."""
        return self.window

    def init_state(self, shape: CacheShape) -> PolicyState:
        """Returns an empty ring of rotated queries; position t is stored at t mod window."""
        return PolicyState(rows=empty_ring(shape, self.window))

    def observe(self, state: PolicyState, chunk: Chunk, placement, seen) -> PolicyState:
        """Writes the chunk's last queries into the ring."""
        return dataclasses.replace(state, rows=remember(state.rows, chunk, seen.q))

    def scores(self, state, chunk, rows) -> Float[Array, "B K S"]:
        """Returns the mean weight of each slot over the window's queries, pooled."""
        slot = jnp.arange(rows.k.shape[2])
        votes = self._votes(state.rows, chunk, rows)
        in_window = slot >= (rows.lengths - self.window)[..., None]
        votes = jnp.where(in_window, 0, votes / self.window)
        reach = self.kernel // 2
        padded = jnp.pad(votes, ((0, 0), (0, 0), (reach, reach)))
        shifted = [padded[..., n : n + votes.shape[-1]] for n in range(self.kernel)]
        return jnp.where(in_window, jnp.inf, sum(shifted) / self.kernel)

    def _votes(self, ring: Float[Array, "B K W G D"], chunk: Chunk, rows: Rows):
        """Returns the weight [B, K, S] that each slot receives from the window's queries."""
        scale, slots = chunk.static.scale, rows.k.shape[2]
        since = jnp.arange(slots) - rows.lengths[..., None]  # the newest slot's is -1
        # Query p is `age` tokens old: it sees all slots in use but the last `age`.
        age = (chunk.newest[:, None] - jnp.arange(self.window)) % self.window
        if chunk.valid.shape[-1] > 1:
            queries = jnp.moveaxis(ring, 2, 1).reshape(len(age), self.window, -1, ring.shape[-1])
            positions = jnp.maximum(slots - 1 - age, -1)
            return received_attention(queries, rows.k, positions, since + slots, scale=scale)
        # After a step many rows are cut at once; blocks limit the memory of their weights.
        size = math.gcd(self.window, 8)

        def add_block(votes, start):
            queries = jax.lax.dynamic_slice_in_dim(ring, start, size, axis=2)
            ages = jax.lax.dynamic_slice_in_dim(age, start, size, axis=1)
            seen = since[:, :, None] < -ages[:, None, :, None]
            return votes + received_weights(queries, rows.k, seen, scale), None

        zeros = jnp.zeros(since.shape, jnp.promote_types(ring.dtype, jnp.float32))
        return jax.lax.scan(add_block, zeros, jnp.arange(0, self.window, size))[0]
