"""KCache (He & Wu, arXiv 2404.18057): all keys on the device, values in host memory.

A step computes the attention weights over every key, and fetches the values of the N largest:

    S = softmax(q K^T / sqrt(D))      A = sum over the N largest of S_j V_j          (section 3.1)

The weights are not normalised again after the cut, so a little less than the whole mass is summed;
`renormalize=True` divides by what is left. Each query head fetches its own N rows. The prompt is
attended densely, and so are the first `first_layers` layers, whose values stay on the device.

Half of the memory of the other layers moves to the host; none is freed, and every key is read.
Under grouped queries the fetch grows with the query heads while the reading that it saves does
not, so the break-even context is H / K times longer than with one KV head a query head
(`dms_jax.analysis.host_values`).
"""

import dataclasses
from typing import Literal

import jax.numpy as jnp

from dms_jax.checks import Count, Whole, require
from dms_jax.policies.base import Chunk, Placement, Policy, Reading
from dms_jax.policies.budget import LONGEST, BudgetRatio, share, shares
from dms_jax.policies.selective import SelectiveReading


@dataclasses.dataclass(frozen=True)
class KCache(SelectiveReading):
    """Fetches the values with the largest attention weights.

    Attributes:
      top: N, values fetched per query head and step.
      compression_ratio: if given, N is (prompt + longest answer) / compression_ratio of each
        request instead. The values are then on the device: from the host comes a fixed number.
      first_layers: first layers whose values stay on the device and are all read.
      renormalize: whether the weights of the fetched values are scaled to sum to one.
      values: where those of the other layers live. "device" saves no memory; it is for a mesh of
        devices, which does not serve "host", and to see what the selection alone does.
      over: the policy that decides what the cache holds.
    """

    top: Count = 128
    compression_ratio: BudgetRatio = None
    first_layers: Whole = 2
    renormalize: bool = False
    values: Literal["host", "device"] = "host"

    def __post_init__(self):
        super().__post_init__()
        require(
            self.compression_ratio is None or self.values == "device",
            "KCache: with a compression_ratio every request fetches another number of values, and "
            "from host memory comes a fixed one; give top, or values='device'.",
        )

    def device_value_layers(self, num_layers: int) -> int:
        """The first layers, or all."""
        return min(self.first_layers, num_layers) if self.values == "host" else num_layers

    @property
    def read_budget(self) -> int:
        """N."""
        return self.top

    @property
    def fetches(self) -> int:
        """N; at most as many as there are, where it is a share."""
        return self.top if self.compression_ratio is None else LONGEST

    def read(self, state, q, chunk: Chunk, placement: Placement) -> Reading:
        """Every key, and the number of values where sequences differ in it."""
        reading = super().read(state, q, chunk, placement)
        if self.compression_ratio is None:
            return reading
        fetches = jnp.maximum(shares(chunk, self.compression_ratio), 1)
        return dataclasses.replace(reading, fetches=fetches)

    def for_horizon(self, tokens: int) -> Policy:
        """The same with a number of values, which no shorter sequence exceeds."""
        policy = super().for_horizon(tokens)
        if self.compression_ratio is None:
            return policy
        top = max(share(tokens, self.compression_ratio), 1)
        return dataclasses.replace(policy, top=top, compression_ratio=None)

    @property
    def renormalizes(self) -> bool:
        """The option."""
        return self.renormalize

    def groups(self, num_layers: int) -> tuple[tuple[int, int, Policy], ...]:
        """The first layers are read as `over` reads."""
        first = min(self.first_layers, num_layers)
        runs = ((0, first, self.over), (first, num_layers, self))
        return tuple(run for run in runs if run[0] < run[1])
