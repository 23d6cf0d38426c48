"""ExpectedAttention (Devoto et al., arXiv 2510.00636): keys that future queries will attend to.

Unrotated queries are modelled as Gaussian, with the mean m and the covariance C of the queries so
far (without the first `sinks`). With R the mean rotation over the next `future` positions, the
expected unnormalised attention of a key is

    e_j     = exp(k_j R m / sqrt(d) + k_j R C R' k_j / 2d)
    score_j = (mean over the group of e_j / sum_i e_i  +  epsilon) * |v_j|

The first `sinks` and the last `recent` tokens are always kept, and are not part of the sum. In the
publication a context is cut before the question is prefilled, so the question stays whole; here set
`recent` to the length of the question, whose queries count too. Published figures on RULER are
those of `AdaKV(ExpectedAttention(epsilon=1e-2, interval=None))` with the question kept. The state
holds the mean and covariance of every query head in at least float32: d and d * d numbers (d
without `covariance`).
"""

import dataclasses
from typing import Annotated, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float

from dms_jax.checks import NotNegative, Range, Traced
from dms_jax.policies.budget import Sinks
from dms_jax.policies.future_rotation import mean_rotation, turn
from dms_jax.policies.periodic_eviction import Scorer
from dms_jax.policies.values import ROWS, CacheShape, Chunk, PolicyState, TracedInt

FURTHEST = 2**17  # positions; more than most models have


@no_type_check  # jax also builds it from shapes and from partitions
@struct.dataclass
class QueryStatistics:
    """Mean of the unrotated queries so far, and the sum of outer products of deviations."""

    mean: Float[Array, "B K G D"] = struct.field(metadata=ROWS)
    spread: Float[Array, "B K G D D"] | None = struct.field(metadata=ROWS)


@dataclasses.dataclass(frozen=True)
class ExpectedAttention(Scorer):
    """Keeps the tokens with the highest expected attention from future queries.

    Attributes:
      budget, compression_ratio, interval: see `Scorer`.
      future: number of future positions over which rotations are averaged, at most `FURTHEST`.
      sinks: number of first tokens that are always kept and whose queries are ignored.
      recent: number of last tokens that are always kept, such as those of a question.
      covariance: whether to use second moments.
      value_norm: whether to multiply by the norm of the value.
      epsilon: constant added to the expected weights before `value_norm` (1e-2 is common with
        AdaKV).
    """

    future: Annotated[int, Range(1, FURTHEST)] = 512
    sinks: Sinks = 4
    recent: Sinks = 0
    covariance: bool = True
    value_norm: bool = True
    epsilon: Annotated[NotNegative, Traced(float)] = 0.0

    protected_by = "sinks and recent"

    @property
    def protected(self) -> TracedInt:
        """See `PeriodicEviction.protected`: the sinks and the recent tokens."""
        return self.sinks + self.recent

    def init_state(self, shape: CacheShape) -> PolicyState:
        """Returns the statistics of zero queries."""
        size = (*shape.rows, shape.group, shape.head_dim)
        spread = jnp.zeros((*size, shape.head_dim), shape.wide) if self.covariance else None
        return PolicyState(rows=QueryStatistics(mean=jnp.zeros(size, shape.wide), spread=spread))

    def observe(self, state: PolicyState, chunk: Chunk, placement, seen) -> PolicyState:
        """Adds the chunk's unrotated queries (Chan et al.'s numerically stable update)."""
        old: QueryStatistics = state.rows
        wide = old.mean.dtype
        batch, num_kv_heads, group, head_dim = old.mean.shape
        queries = chunk.tokens.q.astype(wide)
        queries = queries.reshape(batch, -1, num_kv_heads, group, head_dim)
        counts = chunk.valid[:, 0] & (chunk.tokens.positions >= self.sinks)
        mask = counts[:, :, None, None, None]
        before = jnp.maximum(chunk.first - self.sinks, 0).astype(wide)[:, None, None, None]
        new = counts.sum(1).astype(wide)[:, None, None, None]
        total = jnp.maximum(before + new, 1)
        mean = jnp.where(mask, queries, 0).sum(1) / jnp.maximum(new, 1)
        shift = jnp.where(new > 0, mean - old.mean, 0)
        spread = None
        if old.spread is not None:
            deviation = jnp.where(mask, queries - mean[:, None], 0)
            own = jnp.einsum("BTKGD,BTKGE->BKGDE", deviation, deviation)
            between = shift[..., :, None] * shift[..., None, :]
            spread = old.spread + own + between * (before * new / total)[..., None]
        rows = QueryStatistics(mean=old.mean + shift * new / total, spread=spread)
        return dataclasses.replace(state, rows=rows)

    def scores(self, state, chunk, rows) -> Float[Array, "B K S"]:
        """Returns the expected attention, computed for one query head of every group at a time."""
        queries: QueryStatistics = state.rows
        wide = queries.mean.dtype
        keys = rows.k.astype(wide)
        cos, sin = mean_rotation(chunk, np.arange(1, self.future + 1), wide)
        scale = chunk.static.scale
        num_queries = jnp.maximum(chunk.newest + 1 - self.sinks, 1).astype(wide)
        slot = jnp.arange(keys.shape[2])
        kept = (slot < self.sinks) | (slot >= (rows.lengths - self.recent)[..., None])
        counted = rows.live & ~kept

        def of_head(statistics):
            logits = scale * jnp.einsum("BKD,BKSD->BKS", turn(statistics.mean, cos, sin), keys)
            if statistics.spread is not None:
                covariance = statistics.spread / num_queries[:, None, None, None]
                # R C R': rows are rotated, then columns.
                half = jnp.swapaxes(turn(covariance, cos[:, :, None], sin[:, :, None]), -1, -2)
                covariance = turn(half, cos[:, :, None], sin[:, :, None])
                products = jnp.einsum("BKSD,BKDE->BKSE", keys, covariance)
                logits += scale**2 / 2 * (products * keys).sum(-1)
            return jax.nn.softmax(jnp.where(counted, logits, -1e30), axis=-1)

        by_head = jax.tree.map(lambda x: jnp.moveaxis(x, 2, 0), queries)
        expected = jax.lax.map(of_head, by_head).mean(0)
        if self.value_norm:
            expected = (expected + self.epsilon) * jnp.linalg.norm(rows.v.astype(wide), axis=-1)
        return jnp.where(kept, jnp.inf, expected)
