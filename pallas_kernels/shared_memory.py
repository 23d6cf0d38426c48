"""Shared memory of a program on an NVIDIA GPU, with Mosaic's layout."""

import math
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp

# Scratch memory for sums and maxima over threads, which Mosaic adds to kernels that have any. This
# is its default; kernels request it explicitly, so that the count is exact.
REDUCTION_BYTES = 2048
_ALIGNMENT, _BARRIER_BYTES = 1024, 8


def laid_out(sizes: Iterable[int]) -> int:
    """Returns the bytes of arrays of these sizes, each aligned to 1 KB."""
    return sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)


def shared_bytes(scratch: dict[str, Any], reductions: int) -> int:
    """Returns the shared memory of a program in bytes.

    Args:
      scratch: the arrays and barriers of a kernel, by name (`scratch_types` of `plgpu.kernel`).
      reductions: REDUCTION_BYTES for a kernel with sums or maxima over threads, otherwise 0.
    """
    arrays = [x for x in scratch.values() if hasattr(x, "shape")]
    barriers = sum(
        math.prod(x.get_ref_aval().shape) for x in scratch.values() if not hasattr(x, "shape")
    )
    sizes = (math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in arrays)
    return laid_out(sizes) + reductions + barriers * _BARRIER_BYTES
