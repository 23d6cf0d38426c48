"""Products of matrices in registers, which every NVIDIA GPU from Ampere on computes.

The 16-bit operands and the float32 sums of one warpgroup lie in registers in these layouts. A
matrix on the left has a multiple of 64 rows, its columns come in multiples of 16, and those of the
matrix on the right in multiples of 8.
"""

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

LHS = plgpu.Layout.MMA_LHS(jnp.bfloat16)
RHS = plgpu.Layout.MMA_RHS(jnp.bfloat16)
ACC = plgpu.Layout.MMA_ACC(jnp.bfloat16)


def mma(sums, left, right, interpret: bool):
    """Returns sums + left @ right; the interpreter lacks the instruction."""
    if interpret:
        return sums + jnp.dot(left, right, preferred_element_type=jnp.float32)
    return plgpu.mma(sums, left, right)
