"""Operands of the Hopper decode kernel in shared memory, and how pages are converted to them.

The matrix unit takes bfloat16 (or float16) from shared memory. Other pages are converted: float8 to
one bfloat16, with a scale per slot; float32 to a sum of three bfloat16 parts, of which all products
above 2^-24 are computed, so that the precision of float32 is kept.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode.spec import Spec

# Number of columns of a page that are held in registers at a time.
_PIECE = 64


def swizzle_width(width: int, dtype) -> int:
    """Returns how many elements of an operand's row are swizzled together."""
    size = jnp.dtype(dtype).itemsize
    return next(s for s in (128, 64, 32) if width * size % s == 0) // size


def swizzled(width: int, dtype) -> tuple:
    """Returns the transforms of a shared-memory operand whose rows hold `width` elements."""
    together = swizzle_width(width, dtype)
    swizzle = plgpu.SwizzleTransform(together * jnp.dtype(dtype).itemsize)
    return plgpu.TilingTransform((8, together)), swizzle


def matmul(pairs):
    """Sums the products of pairs of shared-memory operands, in float32 registers."""
    shape = (pairs[0][0].shape[0], pairs[0][1].shape[1])

    def multiply(accumulator):
        for a, b in pairs:
            plgpu.wgmma(accumulator, a, b)
        return accumulator[...]

    return pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))


def per_column(vector, shape):
    """Repeats one value per column over all rows."""
    return lax.broadcast_in_dim(vector, shape, [1])


def _pieces(spec: Spec, start: int, size: int):
    """Cuts columns of a page into pieces that are loaded one at a time, to limit registers."""
    width = max(_PIECE, swizzle_width(spec.head_dim, spec.pages_dtype))
    for at in range(start, start + size, width):
        yield at, min(width, start + size - at)


def _load(spec: Spec, page_smem, start: int, size: int, live):
    """Loads columns of a page, with zeros from slot `live` on unless `live` is None."""
    piece = plgpu.load(page_smem.at[:, pl.ds(start, size)], layout=plgpu.Layout.WGMMA)
    if spec.convert:
        piece = piece.astype(jnp.float32)
    if live is None:
        return piece
    slot = plgpu.broadcasted_iota(jnp.int32, piece.shape, 0, layout=plgpu.Layout.WGMMA)
    return jnp.where(slot < live, piece, jnp.zeros_like(piece))


def convert(spec: Spec, page_smem, target_smem, start: int, size: int, live) -> list:
    """Writes columns of a page as operands that sum to them; returns the operands."""
    for at, width in _pieces(spec, start, size):
        rest = _load(spec, page_smem, at, width, live)
        for part in range(spec.parts):
            operand = rest.astype(spec.operand)
            target_smem[part, :, pl.ds(at - start, width)] = operand
            if part + 1 < spec.parts:
                rest = rest - operand.astype(jnp.float32)
    return [target_smem.at[part] for part in range(spec.parts)]


def value_operands(spec: Spec, page_smem, value_smem, live) -> list[list]:
    """Returns for each block of D the operands of its values, with zeros in unread slots.

    Unread slots may hold NaN, and 0 * NaN is NaN, so their weights of zero do not mask them.
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
