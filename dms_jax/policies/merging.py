"""Merging neighbouring tokens: the weighted means of segments, hard and soft.

Each token either opens a segment or joins the open one, and the cache holds one slot a segment:

    S_t = alpha_t S_{t-1} + omega_t x_t        for x = 1, key, value          (DMC, eq. 9)
    x~_t = S_t(x) / S_t(1) = sum_j c_j x_j / sum_j c_j,   c_j = omega_j prod_{u=j+1..t} alpha_u

with alpha_t = 1 to join, 0 to open, or in between while a model is trained. With a window w only
the last w tokens count, t - w < j <= t. No token comes before the first of a sequence or of a
packed document: its alpha is 0. Keys are merged before rotation, and the merged key is rotated to
the position of the newest token, so that joining a segment rewrites its slot.

On the spine of delayed eviction a merge is an eviction with window 0: the previous token's slot is
taken by the newcomer, which carries the mean of the whole segment. For training, where every
intermediate slot is kept, those that a later token joined fade: key j has the bias
log(1 - alpha_{j+1}) for every query but its own (appendix F).
"""

import dataclasses
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from dms_jax.policies.base import hard_marks
from dms_jax.policies.delayed_eviction import DelayedEviction, Ring
from dms_jax.policies.values import ROWS, CacheShape, Chunk, PolicyState, Retrofit


def segment_sums(values: Any, alpha: Float[Array, "B T K"], window: int | None) -> Any:
    """Returns S_t of the last `window` tokens, or of all.

    Args:
      values: omega_t x_t, a tree of [B, T, K, ...].
      alpha: how far each token joins the segment before it.
      window: tokens that count; None for all.

    All T at once: with a window, sums over 1, 2, 4, ... tokens are doubled and joined, which takes
    about log2(window) passes over the values; without one, an associative scan. Sums are never
    undone by subtraction.
    """
    if window is None or window >= alpha.shape[1]:
        return jax.lax.associative_scan(_join, (alpha, values), axis=1)[1]
    # (product of alpha, sum) over the last `length` tokens of each token.
    total, length = None, 0
    power, size = (alpha, values), 1
    while True:
        if window & size:
            total = power if total is None else _join(_delay(power, length), total)
            length += size
        if length == window:
            return total[1]  # pyright: ignore[reportOptionalSubscript]
        power = _join(_delay(power, size), power)
        size *= 2


def _join(earlier: Any, later: Any) -> Any:
    """(product, sum) of two neighbouring stretches of tokens."""
    product, alpha = earlier[0] * later[0], later[0]
    sums = jax.tree.map(lambda a, b: _like(alpha, b) * a + b, earlier[1], later[1])
    return product, sums


def _delay(tree: Any, by: int) -> Any:
    """Moves entry t to t + by and fills with zeros.

    # by=1  In: [1, 2, 3]  Out: [0, 1, 2]
    """
    return jax.tree.map(
        lambda x: jnp.pad(x[:, :-by], ((0, 0), (by, 0), *((0, 0),) * (x.ndim - 2))), tree
    )


def _like(x: Array, other: Array) -> Array:
    return x.reshape(x.shape + (1,) * (other.ndim - x.ndim))


def partial_means(
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K D"],
    alpha: Float[Array, "B K T"],
    omega: Float[Array, "B K T"],
    window: int | None,
) -> tuple[Float[Array, "B T K D"], Float[Array, "B T K D"]]:
    """Keys and values with every token's segment merged into it (eq. 9), for any alpha.

    Accumulated in the type of `alpha` and `omega`, which is at least float32.
    """
    alpha, omega = (jnp.swapaxes(x, 1, 2) for x in (alpha, omega))
    weights = omega[..., None]
    values = (weights * k.astype(omega.dtype), weights * v.astype(omega.dtype), weights)
    sum_k, sum_v, total = segment_sums(values, alpha, window)
    return (sum_k / total).astype(k.dtype), (sum_v / total).astype(v.dtype)


@no_type_check  # jax also builds it of shapes and of partitions
@struct.dataclass
class MergeState:
    """A row's ring (of one token) and what its open segment has gathered, unrotated.

    Attributes:
      ring: of `DelayedEviction`.
      sums: omega * (k, v, 1), 2 D + 1 numbers: one running sum without a window, else one entry
        for each of the last window - 1 tokens, zero for those outside the open segment.
    """

    ring: Ring = struct.field(metadata=ROWS)
    sums: Float[Array, "*rows n sums"] = struct.field(metadata=ROWS)


@dataclasses.dataclass(frozen=True)
class Merging(DelayedEviction):
    """Base of policies that merge a token into the slot before it. `decide` gives importance."""

    @property
    def retrofit(self) -> Retrofit:
        """A differentiable form; nothing that must be learned."""
        return Retrofit(possible=True)

    @property
    def mark_shift(self) -> int:
        """A merging token takes the slot of the one before it."""
        return 1

    @property
    def merge_window(self) -> int | None:
        """Tokens of a segment that count in its mean, the last ones; None for all."""
        return None

    def init_state(self, shape: CacheShape) -> PolicyState:
        """An empty ring and empty sums."""
        entries = 1 if self.merge_window is None else self.merge_window - 1
        sums = jnp.zeros((*shape.rows, entries, 2 * shape.head_dim + 1), shape.wide)
        return PolicyState(rows=MergeState(ring=super().init_state(shape).rows, sums=sums))

    def merge(self, state: PolicyState, chunk: Chunk) -> tuple[PolicyState, Chunk]:
        """Replaces keys and values by the running means of their segments."""
        rows: MergeState = state.rows
        old_k, old_v = chunk.tokens.k, chunk.tokens.v
        head_dim = old_k.shape[-1]
        assert chunk.decisions.importance is not None
        wide = rows.sums.dtype
        omega = jnp.swapaxes(chunk.decisions.importance, 1, 2)[..., None].astype(wide)  # [B,T,K,1]
        joins = jnp.swapaxes(hard_marks(chunk.decisions), 1, 2)
        alpha = joins.astype(wide)
        new = jnp.concatenate([old_k.astype(wide), old_v.astype(wide)], -1) * omega
        new = jnp.concatenate([new, omega], -1)
        sums = segment_sums(new, alpha, self.merge_window)
        sums += jnp.cumprod(alpha, axis=1)[..., None] * self._carried(rows, old_k.shape[1])
        mean = sums[..., :-1] / sums[..., -1:]
        joins = joins[..., None]
        tokens = dataclasses.replace(
            chunk.tokens,
            k=jnp.where(joins, mean[..., :head_dim].astype(old_k.dtype), old_k),
            v=jnp.where(joins, mean[..., head_dim:].astype(old_v.dtype), old_v),
        )
        rows = dataclasses.replace(rows, sums=self._gathered(rows, sums, new, alpha, chunk.count))
        return dataclasses.replace(state, rows=rows), dataclasses.replace(chunk, tokens=tokens)

    def _carried(self, rows: MergeState, num_tokens: int) -> Float[Array, "B T K sums"]:
        """What was gathered before the chunk and still counts for each of its tokens."""
        before = jnp.moveaxis(rows.sums, 1, 2)  # [B, n, K, sums]
        if self.merge_window is None:
            return before
        # Token t leaves the t oldest of the window - 1 entries behind.
        within = jax.lax.cumsum(before, axis=1, reverse=True)[:, :num_tokens]
        missing = num_tokens - within.shape[1]
        return jnp.pad(within, ((0, 0), (0, missing), (0, 0), (0, 0)))

    def _gathered(
        self,
        rows: MergeState,
        sums: Float[Array, "B T K sums"],
        new: Float[Array, "B T K sums"],
        alpha: Float[Array, "B T K"],
        count: Array,
    ) -> Float[Array, "B K n sums"]:
        """`MergeState.sums` after the chunk's `count` tokens."""
        before = jnp.moveaxis(rows.sums, 1, 2)
        entries = before.shape[1]
        if self.merge_window is None:
            new = sums  # of which the last one
        index = count[:, None] + jnp.arange(entries)  # into what was before and the chunk
        take = lambda x: jnp.take_along_axis(x, index[(...,) + (None,) * (x.ndim - 2)], axis=1)  # noqa: E731
        kept = take(jnp.concatenate([before, new], axis=1))
        if self.merge_window is not None:
            # Whoever opened a segment left the entries before it outside.
            opened = take(jnp.pad(1 - alpha, ((0, 0), (entries, 0), (0, 0))))
            after = jax.lax.cumsum(opened, axis=1, reverse=True) - opened
            kept = jnp.where(after[..., None] > 0, 0, kept)
        return jnp.moveaxis(kept, 2, 1)

    def ring_of(self, rows: MergeState) -> Ring:
        """The ring beside the sums."""
        return rows.ring

    def with_ring(self, rows: MergeState, ring: Ring) -> MergeState:
        """The same sums, another ring."""
        return dataclasses.replace(rows, ring=ring)
