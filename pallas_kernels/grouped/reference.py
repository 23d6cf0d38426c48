"""Grouped products by XLA: block by block of each group's rows, or `jax.lax.ragged_dot`.

A loop takes blocks of rows of one group and multiplies each by the group's matrix. A block that
extends past its group writes zeros there, which the next group overwrites.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

LEAST_ROWS, MOST_ROWS = 8, 256  # per block


def product_xla(
    x: Float[Array, "R inputs"],
    matrices: Float[Array, "X n m"],
    counts: Int[Array, " X"],
    *,
    transposed: bool,
) -> Float[Array, "R outputs"]:
    """Returns the products with the matrices, or with the transposed ones."""
    size, num_blocks, block_at = _blocks(len(x), counts)
    contract = 1 if transposed else 0

    def multiply(i, y):
        group, start, own = block_at(i)
        rows = lax.dynamic_slice_in_dim(padded, start, size)
        matrix = lax.dynamic_index_in_dim(matrices, group, keepdims=False)
        block = lax.dot_general(
            rows, matrix, (((1,), (contract,)), ((), ())), preferred_element_type=_wide(x)
        )
        block = jnp.where(own[:, None], block, 0).astype(x.dtype)
        return lax.dynamic_update_slice_in_dim(y, block, start, 0)

    padded = jnp.pad(x, ((0, size), (0, 0)))
    width = matrices.shape[1 if transposed else 2]
    y = lax.fori_loop(0, num_blocks, multiply, jnp.zeros((len(padded), width), x.dtype))
    return y[: len(x)]


def gradient_xla(
    x: Float[Array, "R n"], gradient: Float[Array, "R m"], counts: Int[Array, " X"]
) -> Float[Array, "X n m"]:
    """Returns the gradient of the matrices."""
    size, num_blocks, block_at = _blocks(len(x), counts)

    def add(i, total):
        group, start, own = block_at(i)
        rows, change = (lax.dynamic_slice_in_dim(each, start, size) for each in padded)
        rows, change = (jnp.where(own[:, None], each, 0) for each in (rows, change))
        product = lax.dot_general(
            rows, change, (((0,), (0,)), ((), ())), preferred_element_type=_wide(x)
        )
        return total.at[group].add(product)

    padded = [jnp.pad(each, ((0, size), (0, 0))) for each in (x, gradient)]
    shape = (len(counts), x.shape[1], gradient.shape[1])
    return lax.fori_loop(0, num_blocks, add, jnp.zeros(shape, _wide(x))).astype(x.dtype)


def _blocks(
    num_rows: int, counts: Int[Array, " X"]
) -> tuple[int, Array, Callable[[Array], tuple[Array, Array, Array]]]:
    """Returns the rows per block, the number of blocks, and a function to the i-th block's content.

    # In: counts [3, 0, 5], blocks of 4 rows
    # Out: (group, first row, rows of the group) (0, 0, 1110) (2, 3, 1111) (2, 7, 1000)
    """
    mean = max(1, num_rows // len(counts))
    size = min(MOST_ROWS, max(LEAST_ROWS, 1 << (mean - 1).bit_length()))
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    blocks = -(-counts // size)
    last = jnp.cumsum(blocks, dtype=jnp.int32)

    def block_at(i):
        group = jnp.searchsorted(last, i, side="right").astype(jnp.int32)
        before = last[group] - blocks[group]
        start = ends[group] - counts[group] + (i - before) * size
        return group, start, start + jnp.arange(size, dtype=jnp.int32) < ends[group]

    return size, last[-1], block_at


def product_ragged_dot(x, matrices, counts, *, transposed: bool) -> Array:
    """Computes `product_xla` by `lax.ragged_dot_general`, a kernel on TPU."""
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2 if transposed else 1,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[0],
    )
    y = lax.ragged_dot_general(x, matrices, counts, numbers, preferred_element_type=_wide(x))
    return behind_the_last_zero(y.astype(x.dtype), counts)


def gradient_ragged_dot(x, gradient, counts) -> Array:
    """Computes `gradient_xla` by `lax.ragged_dot_general`, a kernel on TPU."""
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[],
    )
    wide = _wide(x)
    y = lax.ragged_dot_general(x, gradient, counts, numbers, preferred_element_type=wide)
    return y.astype(x.dtype)


def behind_the_last_zero(y: Float[Array, "R m"], counts: Int[Array, " X"]) -> Array:
    """Returns the rows of the groups, with zeros after the last group."""
    row = jnp.arange(len(y), dtype=jnp.int32)
    return jnp.where((row < counts.sum(dtype=jnp.int32))[:, None], y, 0)


def _wide(x: Array) -> jnp.dtype:
    return jnp.promote_types(x.dtype, jnp.float32)
