"""The arrays of training attention, as its implementations and their kernels take them."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Inputs:
    """The arguments of one call.

    Attributes:
      q: [B, T, H, D] queries; kernels for TPU take [B, K, G, T, D].
      k: [B, S, K, D] keys; kernels for TPU take [B, K, S, D].
      v: [B, S, K, D] values; kernels for TPU take [B, K, S, D].
      bias: [B, K, S] bias of each key. Kernels take it finite, in float32 and divided by the scale;
        those for TPU take [B, K, 1, S].
      segments: [B, S] segment ids, or None for one document.
      start: [] place of the first query among the keys; None for 0, and T = S. Kernels take it as
        [1].
      query_segments: [B, T] segment ids of the queries where there is a start.
    """

    # Arrays; jax also puts shapes and placeholders in their place.
    q: Any
    k: Any
    v: Any
    bias: Any
    segments: Any = None
    start: Any = None
    query_segments: Any = None

    @property
    def own_segments(self) -> Any:
        """The segment ids of the queries, [B, T], or None for one document."""
        return self.segments if self.start is None else self.query_segments

    @property
    def packed(self) -> bool:
        """Whether there are segment ids."""
        return self.segments is not None


class Residuals(NamedTuple):
    """What the backward kernels read beside the inputs.

    Attributes:
      output_gradient: gradient of the output, shaped as the queries.
      minus_lse: minus the natural log-sum-exp of each query over the scale, float32 [B, H, T];
        kernels for TPU take [B, K, blocks, 1, G * query].
      minus_delta: minus the dot product of each output with its gradient, shaped as `minus_lse`.
    """

    output_gradient: jax.Array
    minus_lse: jax.Array
    minus_delta: jax.Array
