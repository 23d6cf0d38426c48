"""The arrays of training attention: arguments of its implementations and kernels."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.padding import pad_axis

LOG2E = math.log2(math.e)
# A masked score, and the initial running maximum. Both are finite, and the first is so far below
# the second that exp2(HIDDEN - maximum) = 0 with any rounding, so a tile in which a row sees no key
# adds nothing to that row.
HIDDEN = -1e30
LOWEST = -1e20


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
      query_segments: [B, T] segment ids of the queries if there is a start.
    """

    # Arrays; jax also replaces them by shapes and placeholders.
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

    def for_kernels(self, q, k, v, tile: int, scale: float) -> "Inputs":
        """Returns the inputs of a kernel: queries, keys and values as given, the rest padded."""
        segments = own_segments = None
        if self.packed:
            segments, own_segments = (
                pad_axis(x.astype(jnp.int32), 1, tile, mode="edge")
                for x in (self.segments, self.own_segments)
            )
        bias = jnp.maximum(self.bias.astype(jnp.float32), HIDDEN) / scale
        start = None if self.start is None else self.start.reshape(1)
        return Inputs(q, k, v, pad_axis(bias, 2, tile), segments, start, own_segments)


class Residuals(NamedTuple):
    """The additional inputs of the backward kernels.

    Attributes:
      output_gradient: gradient of the output, shaped as the queries.
      minus_lse: minus the natural log-sum-exp of each query, divided by the scale, float32 [B, H,
        T]; kernels for TPU take [B, K, blocks, 1, G * query].
      minus_delta: minus the dot product of each output with its gradient, shaped as `minus_lse`.
    """

    output_gradient: jax.Array
    minus_lse: jax.Array
    minus_delta: jax.Array
