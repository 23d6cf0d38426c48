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
from dms_jax.policies.base import LayerGroup, Policy
from dms_jax.policies.budget import LONGEST, BudgetRatio, share, shares
from dms_jax.policies.selective import SelectiveReading
from dms_jax.policies.values import Chunk, Fetch, Footprint, Placement, Reading


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
    compression_ratio: BudgetRatio = dataclasses.field(default=None, kw_only=True)
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

    def groups(self, num_layers: int) -> tuple[LayerGroup, ...]:
        """The first layers are read as `over` reads."""
        first = min(self.first_layers, num_layers)
        runs = (
            LayerGroup(0, first, self.over),
            LayerGroup(first, num_layers, self, host_values=self.values == "host"),
        )
        return tuple(run for run in runs if run.start < run.end)

    def for_length(self, tokens: int) -> Policy:
        """The same with a number of values, which no shorter sequence exceeds."""
        policy = super().for_length(tokens)
        if self.compression_ratio is None:
            return policy
        top = max(share(tokens, self.compression_ratio), 1)
        return dataclasses.replace(policy, top=top, compression_ratio=None)

    def footprint(self, tokens, *, group=1, **options) -> Footprint:
        """That of `over`, of which a step reads every key and, per query head, N values."""
        held = super().footprint(tokens, group=group, **options)
        policy = self.for_length(tokens)
        assert isinstance(policy, KCache)
        if policy.top >= held.expected:
            return held
        return dataclasses.replace(held, reads=(held.expected + policy.top * group) / 2)

    def read(self, state, q, chunk: Chunk, placement: Placement) -> Reading:
        """Every key, and the values of the largest weights."""
        if self.compression_ratio is None:
            fetch = Fetch(self.top, renormalize=self.renormalize)
        else:  # at most as many as there are
            counts = jnp.maximum(shares(chunk, self.compression_ratio), 1)
            fetch = Fetch(LONGEST, counts, self.renormalize)
        return dataclasses.replace(super().read(state, q, chunk, placement), fetch=fetch)
