"""Grouped products on Hopper GPUs, by the kernel that jax ships (`ragged_dot_mgpu`).

Each program multiplies tiles of rows of one group by a tile of its matrix, so only matrices with
rows are read. Each group needs one tile more than its rows, because groups begin within tiles.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import not_hopper
from pallas_kernels.grouped.reference import behind_the_last_zero

_DEPTH = 64  # numbers of a row to multiply at a time
_WIDTHS = (128, 192, 64)  # columns of a tile; the first that divides the matrix is used


def why_not(x, matrices, counts, *, transposed: bool) -> str | None:
    """Returns why the kernel cannot serve a call, or None."""
    del counts
    depth, width = matrices.shape[2 if transposed else 1], matrices.shape[1 if transposed else 2]
    if x.dtype not in (jnp.bfloat16, jnp.float16) or x.dtype != matrices.dtype:
        return f"multiplies bfloat16 or float16, not {x.dtype} and {matrices.dtype}"
    if depth % _DEPTH or all(width % columns for columns in _WIDTHS):
        return f"serves matrices of multiples of {_DEPTH} numbers, not {depth} x {width}"
    if not len(x):
        return "has no rows to multiply"
    return not_hopper()


def product_mosaic(x, matrices, counts, *, transposed: bool) -> jax.Array:
    """Computes `reference.product_xla` by jax's ragged-dot kernel for Hopper."""
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot

    width = matrices.shape[1 if transposed else 2]
    many = len(x) > 64 * len(matrices)
    y = ragged_dot(
        x,
        matrices,
        group_sizes=counts,
        block_m=128 if many else 64,
        block_n=next(columns for columns in _WIDTHS if width % columns == 0),
        block_k=_DEPTH,
        max_concurrent_steps=4 if many else 6,
        grid_block_n=1,
        transpose_rhs=transposed,
    )
    return behind_the_last_zero(y, counts)
