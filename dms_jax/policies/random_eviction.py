"""Random eviction: the baseline for methods that decide which tokens to evict.

A token that leaves the window is evicted with probability `rate`, drawn once per (layer, KV head,
position) from a hash, so the draw depends neither on the batch nor on the split into chunks.
"""

import dataclasses
from typing import Annotated

import numpy as np

from dms_jax.checks import NotNegative, Seed, Share, Traced, Whole
from dms_jax.policies import draws
from dms_jax.policies.delayed_eviction import DelayedEviction
from dms_jax.policies.values import Decisions, Tokens

_OF_RATES = np.uint32(0x5BD1E995)  # separates the draws of heads' rates from those of tokens


@dataclasses.dataclass(frozen=True)
class RandomEviction(DelayedEviction):
    """Evicts a random subset of the tokens that leave the window.

    Attributes:
      window: distance up to which every key is visible.
      rate: probability of eviction, between 0 and 1.
      spread: half-width of the interval rate +- spread, clipped to [0, 1], from which each KV
        head's rate is drawn, for heads of uneven length; 0 gives all heads the same rate.
      seed: random seed of the draws.
    """

    window: Whole = 256
    rate: Annotated[Share, Traced(float)] = 0.5
    spread: Annotated[NotNegative, Traced(float)] = 0.0
    seed: Annotated[Seed, Traced(np.uint32)] = 0

    @property
    def visible_window(self) -> int:
        """See `Policy.visible_window`: the policy's window."""
        return self.window

    def share_kept(self, compression_ratio: float | int) -> float:
        """Returns the expected fraction of tokens that are not evicted."""
        return 1 - self.rate

    def decide(self, tokens: Tokens) -> Decisions:
        """Draws whether each token is evicted."""
        rows = draws.row_hashes(self.seed, tokens.layer, tokens.k.shape[2])
        rate = self.rate + self.spread * (2 * draws.uniform(draws.mix(rows ^ _OF_RATES)) - 1)
        return Decisions(marks=draws.token_uniforms(rows, tokens.positions) < rate)
