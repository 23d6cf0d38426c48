"""KCache (He & Wu, arXiv 2404.18057): all keys on the device, values in host memory.

A decode step computes the attention weights over every key, and fetches the values of the N
largest weights:

    S = softmax(q K^T / sqrt(D))      A = sum over the N largest of S_j V_j          (section 3.1)

The weights are not renormalised after the selection, so they sum to a little less than one. Each
query head fetches its own N values. The prompt gets full attention, and so do the first
`first_layers` layers, whose values stay on the device.

Half of the memory of the other layers moves to the host; none is freed, and every key is read.
With G = H / K query heads per KV head, S tokens, and S and D far above 1, reading is saved if

    N G D / link < (S D - N G D) / device    <=>    S / N > G (device / link + 1)

(equations 3 and 4 for any G; bandwidths in bytes a second). Fetches grow with the number of query
heads, but the saved reads do not: the break-even context is G times longer than with one KV head
per query head.
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
      top: N, the number of values fetched per query head and step.
      compression_ratio: if given, N is (prompt + longest answer) / compression_ratio for each
        request instead. This needs values="device": fetches from the host have a fixed size.
      first_layers: number of first layers whose values stay on the device and are all read.
      values: memory of the other layers' values. "device" saves no memory; it is for meshes, which
        do not support "host", and for measuring the effect of the selection alone.
      over: the policy that decides which tokens the cache holds.
    """

    top: Count = 128
    compression_ratio: BudgetRatio = dataclasses.field(default=None, kw_only=True)
    first_layers: Whole = 2
    values: Literal["host", "device"] = "host"

    def __post_init__(self):
        super().__post_init__()
        require(
            self.compression_ratio is None or self.values == "device",
            "KCache: with a compression_ratio the number of fetched values differs by request, and "
            "fetches from host memory have a fixed size; give top, or values='device'.",
        )

    def groups(self, num_layers: int) -> tuple[LayerGroup, ...]:
        """Returns the first layers, which run `over`, and the other layers."""
        first = min(self.first_layers, num_layers)
        runs = (
            LayerGroup(0, first, self.over),
            LayerGroup(first, num_layers, self, host_values=self.values == "host"),
        )
        return tuple(run for run in runs if run.start < run.end)

    def for_length(self, tokens: int) -> Policy:
        """Returns the same policy with `top` in place of a compression ratio."""
        policy = super().for_length(tokens)
        if self.compression_ratio is None:
            return policy
        top = max(share(tokens, self.compression_ratio), 1)
        return dataclasses.replace(policy, top=top, compression_ratio=None)

    def footprint(self, tokens, *, group=1, **options) -> Footprint:
        """Returns the footprint of `over`, with reads of every key and N values per query head."""
        held = super().footprint(tokens, group=group, **options)
        policy = self.for_length(tokens)
        assert isinstance(policy, KCache)
        if policy.top >= held.expected:
            return held
        return dataclasses.replace(held, reads=(held.expected + policy.top * group) / 2)

    def read(self, state, q, chunk: Chunk, placement: Placement) -> Reading:
        """Reads every key, and fetches the values of the largest weights."""
        if self.compression_ratio is None:
            fetch = Fetch(self.top)
        else:  # at most the tokens of the row
            counts = jnp.maximum(shares(chunk, self.compression_ratio), 1)
            fetch = Fetch(LONGEST, counts)
        return dataclasses.replace(super().read(state, q, chunk, placement), fetch=fetch)
