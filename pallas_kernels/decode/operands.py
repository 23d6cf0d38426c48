"""Operands of the Hopper decode kernel in shared memory, and their conversion from pages.

The matrix unit reads bfloat16 (or float16) from shared memory. Float8 keys are multiplied
unconverted, by queries that are a sum of float8 numbers with 3 significant bits (e5m2), each scaled
to the range of the first:

    q = q_0 + 2^-3 q_1 + 2^-6 q_2,    q_i = e5m2(2^(3 i) (q - what those before it sum to))

Rounding leaves at most half a unit of the last bit, so three hold any 11 significant bits: bfloat16
has 8 and float16 11. An element is exact if its last bit is 2^-22 or more, else off by at most
2^-23. All three are columns of one product, and are summed in float32. The remaining error is that
of the adder of Hopper's matrix unit, which for float8 aligns the products of 32 elements and the
sum so far to the largest exponent among them, and truncates each to 13 bits below it:

    |error of q . k| <= sum_blocks 33 2^-13 max(|q_d k_d| of the block, |sum of those before|)

Float8 values must be transposed, which the matrix unit supports only for 16-bit numbers. They are
converted to float16, two numbers per instruction, in a second buffer.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode.spec import QUERY_STEP, Spec

# Number of columns of a page held in registers at a time.
_PIECE = 64


def swizzle_width(width: int, dtype) -> int:
    """Returns the number of elements of an operand's row that are swizzled together."""
    size = jnp.dtype(dtype).itemsize
    return next(s for s in (128, 64, 32) if width * size % s == 0) // size


def swizzled(width: int, dtype) -> tuple:
    """Returns the transforms of a shared-memory operand whose rows hold `width` elements."""
    together = swizzle_width(width, dtype)
    swizzle = plgpu.SwizzleTransform(together * jnp.dtype(dtype).itemsize)
    return plgpu.TilingTransform((8, together)), swizzle


def matmul(a, b, shape):
    """Returns the product of two operands in shared memory, in float32 registers."""

    def multiply(accumulator):
        plgpu.wgmma(accumulator, a, b)
        return accumulator[...]

    return pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))


def per_column(vector, shape):
    """Repeats one value per column over all rows."""
    return lax.broadcast_in_dim(vector, shape, [1])


def _pieces(spec: Spec, start: int, size: int):
    """Cuts columns of a page into pieces to load one at a time, to limit registers."""
    width = max(_PIECE, swizzle_width(spec.head_dim, spec.pages_dtype))
    for at in range(start, start + size, width):
        yield at, min(width, start + size - at)


def multiply_keys(spec: Spec, page_smem, q_smem):
    """Returns the products of a tile's keys and the queries, [tile, N].

    Args:
      spec: the static parameters.
      page_smem: the keys, [tile, D].
      q_smem: the operands that sum to the queries, stacked, [parts N, D].
    """
    width = spec.columns
    shape = (spec.tile, spec.query_parts * width)
    products = matmul(page_smem, q_smem.transpose((1, 0)), shape)
    if not spec.scaled:
        return products
    total = products[:, -width:]
    for part in reversed(range(spec.query_parts - 1)):
        total = total * QUERY_STEP + products[:, part * width : (part + 1) * width]
    return total


def _clear(operand_smem, live) -> None:
    """Writes zeros to the rows of an operand from slot `live` on."""
    width = operand_smem.shape[1]
    for start in range(0, width, _PIECE):
        columns = pl.ds(start, min(_PIECE, width - start))
        piece = plgpu.load(operand_smem.at[:, columns], layout=plgpu.Layout.WGMMA)
        slot = plgpu.broadcasted_iota(jnp.int32, piece.shape, 0, layout=plgpu.Layout.WGMMA)
        operand_smem[:, columns] = jnp.where(slot < live, piece, jnp.zeros_like(piece))


def value_operands(spec: Spec, page_smem, value_smem) -> list:
    """Returns the values of each block of D as an operand."""
    if not spec.stage_values:
        return [page_smem]
    return [value_smem.at[block] for block in range(len(spec.blocks))]


def prepare_values(spec: Spec, page_smem, value_smem, live) -> None:
    """Prepares the operands of a tile's values, with zeros in unread slots.

    Unread slots may hold NaN, and 0 * NaN is NaN, so their weights of zero do not mask them.
    """
    operands = value_operands(spec, page_smem, value_smem)
    if spec.stage_values:
        for operand, (start, size) in zip(operands, spec.blocks, strict=True):
            for at, width in _pieces(spec, start, size):
                columns = page_smem.at[:, pl.ds(at, width)]
                piece = plgpu.load(columns, layout=plgpu.Layout.WGMMA)
                operand[:, pl.ds(at - start, width)] = piece.astype(spec.operand)

    @pl.when(live < spec.tile)
    def _():
        for operand in operands:
            _clear(operand, live)
