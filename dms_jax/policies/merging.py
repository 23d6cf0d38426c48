"""Merging neighbouring tokens: weighted means of segments, with hard or soft decisions.

Each token either opens a segment or joins the open one, and the cache holds one slot per segment:

    S_t = alpha_t S_{t-1} + omega_t x_t        for x = 1, key, value          (DMC, eq. 9)
    x~_t = S_t(x) / S_t(1) = sum_j c_j x_j / sum_j c_j,   c_j = omega_j prod_{u=j+1..t} alpha_u

with alpha_t = 1 to join, 0 to open, or in between (partial accumulation) in training. With a
window w only the last w tokens count, t - w < j <= t. The first token of a sequence or of a packed
document has alpha 0. Keys are merged before rotation, and the merged key is rotated to the
position of the newest token, so joining a segment rewrites its slot.

In terms of delayed eviction a merge is an eviction with window 0: the new token takes the previous
token's slot and stores the mean of the whole segment. In training every intermediate slot is kept,
and slots that a later token joined are masked softly: key j has the bias log(1 - alpha_{j+1}) for
every query but its own (appendix F).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dms_jax.policies.base import hard_marks
from dms_jax.policies.delayed_eviction import DelayedEviction
from dms_jax.policies.values import CacheShape, Chunk, Extended, PolicyState, Retrofit


def segment_sums(values: Any, alpha: Float[Array, "B T K"], window: int | None) -> Any:
    """Returns S_t over the last `window` tokens, or over all tokens.

    Args:
      values: omega_t x_t, a tree of [B, T, K, ...].
      alpha: degree to which each token joins the segment before it, from 0 to 1.
      window: number of tokens to sum over; None for all.

    All T sums are computed at once: with a window, by doubling and joining sums over 1, 2, 4, ...
    tokens in about log2(window) passes over the values; without one, by an associative scan. There
    are no subtractions, so no cancellation.
    """
    if window is None or window >= alpha.shape[1]:
        return jax.lax.associative_scan(_join, (alpha, values), axis=1)[1]
    # (product of alpha, sum) over the last `length` tokens up to each token.
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
    """Combines (product, sum) of two adjacent ranges of tokens."""
    product, alpha = earlier[0] * later[0], later[0]
    sums = jax.tree.map(lambda a, b: _expand_to(alpha, b) * a + b, earlier[1], later[1])
    return product, sums


def _delay(tree: Any, by: int) -> Any:
    """Moves entry t to t + by, and fills with zeros.

    # by=1  In: [1, 2, 3]  Out: [0, 1, 2]
    """
    return jax.tree.map(
        lambda x: jnp.pad(x[:, :-by], ((0, 0), (by, 0), *((0, 0),) * (x.ndim - 2))), tree
    )


def _expand_to(x: Array, other: Array) -> Array:
    return x.reshape(x.shape + (1,) * (other.ndim - x.ndim))


def partial_means(
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K D"],
    alpha: Float[Array, "B K T"],
    omega: Float[Array, "B K T"],
    window: int | None,
) -> tuple[Float[Array, "B T K D"], Float[Array, "B T K D"]]:
    """Returns keys and values with each token's segment merged into it (eq. 9), for any alpha.

    The sums have the dtype of `alpha` and `omega`, which is at least float32.
    """
    alpha, omega = (jnp.swapaxes(x, 1, 2) for x in (alpha, omega))
    weights = omega[..., None]
    values = (weights * k.astype(omega.dtype), weights * v.astype(omega.dtype), weights)
    sum_k, sum_v, total = segment_sums(values, alpha, window)
    return (sum_k / total).astype(k.dtype), (sum_v / total).astype(v.dtype)


@dataclasses.dataclass(frozen=True)
class Merging(DelayedEviction):
    """Base of policies that merge a token into the previous slot, weighted by `importance`.

    Beside the ring of `DelayedEviction`, a row keeps the unrotated sums of its open segment,
    omega * (k, v, 1), [B, K, n, 2 D + 1]: one running sum without a window, else one entry for each
    of the last window - 1 tokens, zero for those outside the open segment.
    """

    @property
    def retrofit(self) -> Retrofit:
        """A differentiable form, but no decisions to learn."""
        return Retrofit(possible=True)

    @property
    def mark_shift(self) -> int:
        """See `DelayedEviction.mark_shift`: a merged token takes the slot of the previous one."""
        return 1

    @property
    def merge_window(self) -> int | None:
        """Number of most recent tokens in the mean of a segment; None for all."""
        return None

    def init_state(self, shape: CacheShape) -> PolicyState:
        """Returns an empty ring and zero sums for each row."""
        entries = 1 if self.merge_window is None else self.merge_window - 1
        sums = jnp.zeros((*shape.rows, entries, 2 * shape.head_dim + 1), shape.wide)
        return PolicyState(rows=Extended(super().init_state(shape).rows, sums))

    def merge(self, state: PolicyState, chunk: Chunk) -> tuple[PolicyState, Chunk]:
        """Replaces keys and values by the running means of their segments."""
        rows: Extended = state.rows
        before = rows.own
        old_k, old_v = chunk.tokens.k, chunk.tokens.v
        head_dim = old_k.shape[-1]
        assert chunk.decisions.importance is not None
        wide = before.dtype
        omega = jnp.swapaxes(chunk.decisions.importance, 1, 2)[..., None].astype(wide)  # [B,T,K,1]
        joins = jnp.swapaxes(hard_marks(chunk.decisions), 1, 2)
        alpha = joins.astype(wide)
        new = jnp.concatenate([old_k.astype(wide), old_v.astype(wide)], -1) * omega
        new = jnp.concatenate([new, omega], -1)
        sums = segment_sums(new, alpha, self.merge_window)
        sums += jnp.cumprod(alpha, axis=1)[..., None] * self._earlier_share(before, old_k.shape[1])
        mean = sums[..., :-1] / sums[..., -1:]
        joins = joins[..., None]
        tokens = dataclasses.replace(
            chunk.tokens,
            k=jnp.where(joins, mean[..., :head_dim].astype(old_k.dtype), old_k),
            v=jnp.where(joins, mean[..., head_dim:].astype(old_v.dtype), old_v),
        )
        own = self._gathered(before, sums, new, alpha, chunk.count)
        state = dataclasses.replace(state, rows=dataclasses.replace(rows, own=own))
        return state, dataclasses.replace(chunk, tokens=tokens)

    def _earlier_share(
        self, before: Float[Array, "B K n sums"], num_tokens: int
    ) -> Float[Array, "B T K sums"]:
        """Returns the share of the earlier sums that each token of the chunk still includes."""
        before = jnp.moveaxis(before, 1, 2)  # [B, n, K, sums]
        if self.merge_window is None:
            return before
        # For token t, the t oldest of the window - 1 entries are outside the window.
        within = jax.lax.cumsum(before, axis=1, reverse=True)[:, :num_tokens]
        missing = num_tokens - within.shape[1]
        return jnp.pad(within, ((0, 0), (0, missing), (0, 0), (0, 0)))

    def _gathered(
        self,
        before: Float[Array, "B K n sums"],
        sums: Float[Array, "B T K sums"],
        new: Float[Array, "B T K sums"],
        alpha: Float[Array, "B T K"],
        count: Array,
    ) -> Float[Array, "B K n sums"]:
        """Returns the sums that a row keeps after the chunk's `count` tokens."""
        before = jnp.moveaxis(before, 1, 2)
        entries = before.shape[1]
        if self.merge_window is None:
            new = sums  # only the last one is kept
        index = count[:, None] + jnp.arange(entries)  # into the earlier entries and the chunk's
        take = lambda x: jnp.take_along_axis(x, index[(...,) + (None,) * (x.ndim - 2)], axis=1)  # noqa: E731
        kept = take(jnp.concatenate([before, new], axis=1))
        if self.merge_window is not None:
            # Entries before the token that opened the segment do not belong to it.
            opened = take(jnp.pad(1 - alpha, ((0, 0), (entries, 0), (0, 0))))
            after = jax.lax.cumsum(opened, axis=1, reverse=True) - opened
            kept = jnp.where(after[..., None] > 0, 0, kept)
        return jnp.moveaxis(kept, 2, 1)
