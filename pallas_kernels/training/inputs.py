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
      k: [B, T, K, D] keys; kernels for TPU take [B, K, T, D].
      v: [B, T, K, D] values; kernels for TPU take [B, K, T, D].
      bias: [B, K, T] bias of each key. Kernels take it finite, in float32 and divided by the scale;
        those for TPU take [B, K, 1, T].
      segments: [B, T] segment ids, or None for one document.
    """

    # Arrays; jax also puts shapes and placeholders in their place.
    q: Any
    k: Any
    v: Any
    bias: Any
    segments: Any = None

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
