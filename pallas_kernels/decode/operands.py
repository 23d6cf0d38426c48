"""What the Hopper decode kernel multiplies: operands in shared memory, and how pages become them.

The matrix unit takes bfloat16 (or float16) from shared memory. Other pages are converted: float8 to
one bfloat16, times a scale a slot; float32 to a sum of three bfloat16 parts, of which every product
above 2^-24 is taken, so that float32 keeps its precision.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode.spec import Spec

# Columns of a page that are held in registers at a time.
_PIECE = 64


def swizzle_width(width: int, dtype) -> int:
    """Elements of a row of an operand that are swizzled together."""
    size = jnp.dtype(dtype).itemsize
    return next(s for s in (128, 64, 32) if width * size % s == 0) // size


def swizzled(width: int, dtype) -> tuple:
    """Transforms of a shared-memory operand whose rows hold `width` elements."""
    together = swizzle_width(width, dtype)
    swizzle = plgpu.SwizzleTransform(together * jnp.dtype(dtype).itemsize)
    return plgpu.TilingTransform((8, together)), swizzle


def matmul(pairs):
    """Sum the products of pairs of shared-memory operands, in float32 registers."""
    shape = (pairs[0][0].shape[0], pairs[0][1].shape[1])

    def multiply(accumulator):
        for a, b in pairs:
            plgpu.wgmma(accumulator, a, b)
        return accumulator[...]

    return pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))


def per_column(vector, shape):
    """Repeat one value a column over all rows."""
    return lax.broadcast_in_dim(vector, shape, [1])


def _pieces(spec: Spec, start: int, size: int):
    """Cut columns of a page into pieces that are loaded at a time, to bound registers."""
    width = max(_PIECE, swizzle_width(spec.head_dim, spec.pages_dtype))
    for at in range(start, start + size, width):
        yield at, min(width, start + size - at)


def _load(spec: Spec, page_smem, start: int, size: int, live):
    """Load columns of a page; from slot `live` on, unless it is None, zeros take their place."""
    piece = plgpu.load(page_smem.at[:, pl.ds(start, size)], layout=plgpu.Layout.WGMMA)
    if spec.convert:
        piece = piece.astype(jnp.float32)
    if live is None:
        return piece
    slot = plgpu.broadcasted_iota(jnp.int32, piece.shape, 0, layout=plgpu.Layout.WGMMA)
    return jnp.where(slot < live, piece, jnp.zeros_like(piece))


def convert(spec: Spec, page_smem, target_smem, start: int, size: int, live) -> list:
    """Write columns of a page as operands whose sum they are; returns the operands."""
    for at, width in _pieces(spec, start, size):
        rest = _load(spec, page_smem, at, width, live)
        for part in range(spec.parts):
            operand = rest.astype(spec.operand)
            target_smem[part, :, pl.ds(at - start, width)] = operand
            if part + 1 < spec.parts:
                rest = rest - operand.astype(jnp.float32)
    return [target_smem.at[part] for part in range(spec.parts)]


def value_operands(spec: Spec, page_smem, value_smem, live) -> list[list]:
    """For each block of D the operands of its values, with zeros in unread slots.

    Unread slots may hold NaN, and their weights of zero do not mask NaN.
    """
    if spec.stage_values:
        return [
            convert(spec, page_smem, value_smem.at[block], start, size, live)
            for block, (start, size) in enumerate(spec.blocks)
        ]

    @pl.when(live < spec.tile)
    def _clear():
        for start, size in _pieces(spec, 0, spec.head_dim):
            page_smem[:, pl.ds(start, size)] = _load(spec, page_smem, start, size, live)

    return [[page_smem]]
