"""Random eviction: the control for every method that chooses.

A token leaves the window with probability `rate`, drawn once per (layer, KV head, position) from
a hash, so that the draw depends neither on the batch nor on how the sequence is cut into chunks.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, UInt32

from dms_jax.policies.base import Decisions, Projections, is_finite, is_static_int, require
from dms_jax.policies.delayed_eviction import DelayedEviction


@dataclasses.dataclass(frozen=True)
class RandomEviction(DelayedEviction):
    """Evicts a random share of the tokens that leave the window.

    Attributes:
      window: distance up to which every key is visible.
      rate: probability of eviction, between 0 and 1.
      spread: the rate of KV head h is drawn once from rate +- spread (clipped to [0, 1]), for
        heads of uneven length; 0 treats all alike.
      seed: of the draws.
    """

    window: int = 256
    rate: float = 0.5
    spread: float = 0.0
    seed: int = 0

    def __post_init__(self):
        require(
            is_static_int(self.window),
            f"RandomEviction: window must be a whole number >= 0, got {self.window!r}.",
        )
        require(
            is_finite(self.rate) and 0 <= self.rate <= 1,
            f"RandomEviction: rate must be a number in [0, 1], got {self.rate!r}.",
        )
        require(
            is_finite(self.spread) and self.spread >= 0,
            f"RandomEviction: spread must be a number >= 0, got {self.spread!r}.",
        )
        require(
            is_static_int(self.seed) and self.seed < 2**32,
            f"RandomEviction: seed must be a whole number from 0 to 2**32 - 1, got {self.seed!r}.",
        )

    @property
    def visible_window(self) -> int:
        """The window."""
        return self.window

    def decide(self, projections: Projections) -> Decisions:
        """Draws each token's fate."""
        heads = jnp.arange(projections.k.shape[2], dtype=jnp.uint32)[None, :, None]
        positions = projections.positions.astype(jnp.uint32)[:, None, :]
        layer = projections.layer.astype(jnp.uint32)
        row = _mix(_mix(jnp.uint32(self.seed) ^ _mix(layer + 1)) + heads)
        rate = self.rate + self.spread * (2 * _uniform(_mix(row ^ jnp.uint32(0x5BD1E995))) - 1)
        return Decisions(marks=_uniform(_mix(row + _mix(positions))) < rate)


def _mix(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """A bijective integer hash with good avalanche (two multiply-xorshift rounds)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def _uniform(x: UInt32[Array, "..."]) -> Array:
    """Hash bits as a float in [0, 1)."""
    return (x >> 8).astype(jnp.float32) * jnp.float32(2**-24)
