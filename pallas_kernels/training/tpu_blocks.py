"""Blocks, visibility and idioms shared by the training kernels for TPU.

A block of scores holds `rows` = G * query rows (or columns, transposed) by `keys`. Blocks above the
diagonal, or whose segments cannot meet, are neither copied nor computed; a block below it is

    far     every distance query - key is beyond the window: the bias is added, nothing is masked
    near    none is: plain attention
    mixed   anything else: the bias is selected and the masks are applied, per score
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
LOG2E = math.log2(math.e)
HIDDEN = -1e30  # A score that is not seen.
LOWEST = -1e20  # The running maximum before anything is seen; far above HIDDEN.
MAXIMUM_ROWS = 1024
MAXIMUM_SCORES = 256 * 1024


@dataclass(frozen=True)
class Problem:
    """The static facts of one call; T is already a multiple of both block sizes.

    Attributes:
      query: tokens of a query block.
      keys: tokens of a key block.
      packed: there are segment ids.
      interpret: False, or the parameters of the TPU interpreter.
    """

    B: int
    T: int
    K: int
    G: int
    D: int
    window: int
    scale: float
    dtype: jnp.dtype
    query: int
    keys: int
    packed: bool
    interpret: object

    @classmethod
    def make(cls, B, T, H, K, D, window, scale, dtype, packed, interpret) -> "Problem":
        """Choose the blocks: as large as about 1 MB of float32 scores allows."""
        group = H // K
        padded = -(-T // LANES) * LANES
        sizes = [size for size in (512, 256, 128) if padded % size == 0]
        dtype = jnp.dtype(dtype)
        wide = max(1, D * dtype.itemsize // 256)
        query = next((size for size in sizes if group * size * wide <= MAXIMUM_ROWS), LANES)
        scores = MAXIMUM_SCORES * 2 // dtype.itemsize
        keys = next((size for size in sizes if group * query * size <= scores), LANES)
        window = min(window, padded)
        return cls(B, padded, K, group, D, window, scale, dtype, query, keys, packed, interpret)

    @property
    def rows(self) -> int:
        """Rows of a block of scores."""
        return self.G * self.query

    @property
    def multiplier(self) -> float:
        """From raw products to base-2 exponents."""
        return self.scale * LOG2E


def pad_axis(x: jax.Array, axis: int, size: int, **mode) -> jax.Array:
    """Pad one axis up to a size."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths, **mode) if widths[axis][1] else x


def product(problem: Problem, a, b, contract: tuple[int, int]):
    """Multiply two blocks, contracting axis contract[0] of a with contract[1] of b, to float32."""
    exact = problem.dtype == jnp.float32
    return lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        preferred_element_type=jnp.float32,
        precision=lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT,
    )


def to_column(row):
    """Turn a [1, N] row into an [N, 1] column."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T[:, :1]


def to_row(column):
    """Turn an [N, 1] column into a [1, N] row."""
    return jnp.broadcast_to(column, (column.shape[0], LANES)).T[:1]


def segment_bounds(problem: Problem, segments: jax.Array) -> tuple[jax.Array, jax.Array]:
    """First key block of every query block and last query block of every key block, by segments."""

    def interval(size):
        blocks = segments.reshape(problem.B, -1, size)
        return blocks.min(-1), blocks.max(-1)

    (query_low, query_high), (key_low, key_high) = interval(problem.query), interval(problem.keys)
    meet = query_low[:, :, None] <= key_high[:, None, :]
    meet &= key_low[:, None, :] <= query_high[:, :, None]
    first = jnp.argmax(meet, axis=2)
    last = meet.shape[1] - 1 - jnp.argmax(meet[:, ::-1], axis=1)
    return first.astype(jnp.int32), last.astype(jnp.int32)


def by_zone(problem: Problem, query_block, key_block, visible, body) -> None:
    """Call `body(bias=, masked=)` for the zone of one block of scores, if it is visible."""
    q0, k0 = query_block * problem.query, key_block * problem.keys
    below = k0 + problem.keys - 1 <= q0
    far = below & (q0 - (k0 + problem.keys - 1) > problem.window)
    near = below & (q0 + problem.query - 1 - k0 <= problem.window)
    if problem.packed:
        pl.when(visible)(lambda: body(bias=True, masked=True))
        return
    pl.when(visible & far)(lambda: body(bias=True, masked=False))
    pl.when(visible & near)(lambda: body(bias=False, masked=False))
    pl.when(visible & ~far & ~near)(lambda: body(bias=True, masked=True))


def distances(problem: Problem, query_block, key_block, *, transposed: bool):
    """Return query - key of every score of a block, rows of all the group's heads."""
    shape = (problem.keys, problem.rows) if transposed else (problem.rows, problem.keys)
    queries = lax.broadcasted_iota(jnp.int32, shape, 1 if transposed else 0)
    keys = lax.broadcasted_iota(jnp.int32, shape, 0 if transposed else 1)
    # Rows are (head, query): every head's queries count from the same token.
    queries = lax.rem(queries, jnp.int32(problem.query))
    return (queries - keys) + (query_block * problem.query - key_block * problem.keys)


def call(problem: Problem, kernel, grid, in_specs, out_specs, out_shape, scratch, prefetch, name):
    """Build a kernel: the last grid axis in sequence, scalars prefetched where it is packed."""
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=prefetch,
            grid=grid,
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=scratch,
        ),
        out_shape=out_shape,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * (len(grid) - 1) + ("arbitrary",)
        ),
        interpret=problem.interpret,
        name=name,
    )
