"""Products of matrices in registers, for all NVIDIA GPUs since Ampere.

The 16-bit operands and the float32 sums of one warpgroup lie in registers in these layouts. A left
matrix has a multiple of 64 rows and of 16 columns, a right matrix a multiple of 8 columns.
"""

from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

LHS = plgpu.Layout.MMA_LHS(jnp.bfloat16)
RHS = plgpu.Layout.MMA_RHS(jnp.bfloat16)
ACC = plgpu.Layout.MMA_ACC(jnp.bfloat16)


def mma(sums, left, right, interpret: bool):
    """Returns sums + left @ right; the interpreter lacks the instruction."""
    if interpret:
        return sums + jnp.dot(left, right, preferred_element_type=jnp.float32)
    return plgpu.mma(sums, left, right)


def as_left(x, dtype, interpret: bool):
    """Returns sums of one product, rounded to 16 bits, as the left operand of another.

    Each thread already has the numbers that it needs, so only the name of the layout changes.
    """
    if interpret:
        return x.astype(dtype)

    def round_and_rename(_, sums):
        # The registers of a 64 x 16 tile are those of its two 64 x 8 tiles, concatenated.
        rounded = sums.astype(utils.dtype_to_ir_type(dtype))
        layout = mosaic.MMALayouts(dtype).lhs
        registers = rounded.registers.reshape(layout.registers_shape(rounded.shape))
        return mosaic.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    result = plgpu.ShapeDtypeStruct(x.shape, dtype, layout=LHS)
    inline: Any = plgpu.inline_mgpu(arg_types=(ACC,), return_type=result)
    return inline(round_and_rename)(x)
