"""R-KV (Cai et al., arXiv 2505.24133): tokens that are attended to and unlike the others.

For a KV head that holds S keys, with the last w queries and o = S - w older keys:

    A_j     = max over |n| <= kernel / 2 of  mean over the w queries i of
              softmax over the older j of (max over the group of q_i k_j / sqrt(d)),  at j + n
    R_j     = softmax over all S keys j of  mean over all S keys i of  c_ij
    score_j = mix A_j - (1 - mix) R_j

c is the cosine of two keys, 0 for i = j. Of the keys similar to key i (c_ij > 0.5), the last one is
not redundant: there c is 0 as well; and if none is similar, it is 0 for the first key, as in the
authors' code (github.com/Zefan-Cai/R-KV, `rkv/compression/r1_kv.py`). The last w tokens always
stay. The end of a prompt cuts nothing: at every `interval`-th generated token, rows with budget +
interval or more tokens are cut to the budget, both prompt and answer. `mix` is 0.1 in the paper,
0.07 in that code's defaults.

The state holds the last w queries of every head. A cut takes S * S * d products per head.
"""

import dataclasses
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from dms_jax.checks import Count, Range, Share, Traced, require
from dms_jax.policies.periodic_eviction import AnswerEviction, holds
from dms_jax.policies.recent_queries import empty_ring, remember
from dms_jax.policies.snapkv import WIDEST_KERNEL
from dms_jax.policies.values import CacheShape, Chunk

ALIKE = 0.5  # cosine above which two keys are similar
_BLOCK = 64  # keys whose cosines with all others are in memory at a time


@dataclasses.dataclass(frozen=True)
class RKV(AnswerEviction):
    """Keeps tokens that recent queries attend to and that are not redundant, in long answers.

    Attributes:
      budget, compression_ratio, interval: see `AnswerEviction`.
      window: number of recent queries that vote; their tokens are kept.
      kernel: number of tokens over which the largest vote counts, odd.
      mix: weight of attention; 1 - mix is the weight of redundancy.
    """

    window: Count = 8
    kernel: Annotated[int, Range(1, WIDEST_KERNEL)] = 7
    mix: Annotated[Share, Traced(float)] = 0.1

    protected_by = "window"

    def __post_init__(self):
        super().__post_init__()
        require(self.kernel % 2 == 1, f"RKV: kernel must be an odd number, got {self.kernel}.")
        require(
            self.interval >= self.window,
            f"RKV: an interval of {self.interval} tokens is shorter than the window of "
            f"{self.window}, whose queries are those of the answer; raise the interval.",
        )

    @property
    def protected(self) -> int:
        """See `PeriodicEviction.protected`: the window."""
        return self.window

    def init_own(self, shape: CacheShape) -> Any:
        """Returns an empty ring of rotated queries."""
        return empty_ring(shape, self.window)

    def observe_own(self, own: Any, chunk: Chunk, q: Float[Array, "B T H D"]) -> Any:
        """Writes the chunk's last queries into the ring."""
        return remember(own, chunk, q)

    def due(self, state, lengths, chunk) -> Bool[Array, " B"]:
        """Returns whether an interval of the answer ends and rows hold budget + interval tokens."""
        prompt = state.rows.base[:, 0]
        generated = chunk.newest + 1 - prompt
        full = holds(lengths, self.layer_budget(chunk)[:, 0] + self.interval, chunk)
        return full & (generated % self.interval == 0)

    def scores(self, state, chunk, rows) -> Float[Array, "B K S"]:
        """Returns attention minus redundancy; the window scores +inf."""
        slot = jnp.arange(rows.k.shape[2])
        old = slot < (rows.lengths - self.window)[..., None]
        keys = rows.k.astype(jnp.promote_types(rows.k.dtype, jnp.float32))
        attention = self._attention(state.rows.own, keys, old, chunk.static.scale)
        score = self.mix * attention - (1 - self.mix) * redundancy(keys, rows.live)
        return jnp.where(old, score, jnp.inf)

    def _attention(
        self,
        ring: Float[Array, "B K W G D"],
        keys: Float[Array, "B K S D"],
        old: Bool[Array, "B K S"],
        scale: float,
    ) -> Float[Array, "B K S"]:
        """Returns the mean weight of each older key over the window's queries, max-pooled."""
        logits = jnp.einsum("BKWGD,BKSD->BKWGS", ring.astype(keys.dtype), keys) * scale
        logits = jnp.where(old[:, :, None], logits.max(3), -1e30)
        votes = jnp.where(old, jax.nn.softmax(logits, axis=-1).mean(2), 0)
        reach = self.kernel // 2
        padded = jnp.pad(votes, ((0, 0), (0, 0), (reach, reach)))
        shifted = [padded[..., n : n + votes.shape[-1]] for n in range(self.kernel)]
        return jnp.stack(shifted).max(0)


def redundancy(keys: Float[Array, "B K S D"], live: Bool[Array, "B K S"]) -> Float[Array, "B K S"]:
    """Returns the similarity of each live key to the others, as shares that sum to one (R)."""
    batch, heads, slots, _ = keys.shape
    unit = keys / (jnp.linalg.norm(keys, axis=-1, keepdims=True) + 1e-8)
    unit = jnp.where(live[..., None], unit, 0)
    size = min(_BLOCK, slots)
    padded = jnp.pad(unit, ((0, 0), (0, 0), (0, -slots % size), (0, 0)))
    column = jnp.arange(slots)

    def add_block(total, first):
        block = jax.lax.dynamic_slice_in_dim(padded, first, size, axis=2)
        row = first + jnp.arange(size)[:, None]
        cosine = jnp.einsum("BKRD,BKSD->BKRS", block, unit)
        cosine = jnp.where(row == column, 0, cosine)
        # The last similar key; the first key if none is similar.
        last = jnp.where(cosine > ALIKE, column, 0).max(-1, keepdims=True)
        return total + jnp.where(column == last, 0, cosine).sum(2), None

    zeros = jnp.zeros((batch, heads, slots), keys.dtype)
    total = jax.lax.scan(add_block, zeros, jnp.arange(0, slots, size))[0]
    mean = total / jnp.maximum(live.sum(-1, keepdims=True), 1)
    return jax.nn.softmax(jnp.where(live, mean, -1e30), axis=-1)
