"""Common code of the training kernels with the products of Ampere, which later GPUs have too.

They use the formulas and the zones of the Hopper kernels (see `gpu_tiles`), but move data
differently: a single warpgroup holds the next tile in registers while it computes on the current
one, which it has written to shared memory. Several programs share a core, so that the loads of one
are in flight while another computes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import target_gpu
from pallas_kernels.mma import ACC, LHS, RHS, as_left, mma
from pallas_kernels.training.gpu_tiles import (
    Problem,
    columns_of,
    key_zones,
    rows_of,
    segment_overlap,
    segment_references,
)
from pallas_kernels.training.inputs import Inputs

# Number of head dims per product; 96 is split into 64 and 32.
PART = 64


@dataclass(frozen=True)
class Blocks:
    """The tiles of a kernel.

    Attributes:
      rows: number of tokens that a program owns: a multiple of 64.
      columns: number of tokens in a streamed tile.
    """

    rows: int
    columns: int


def on_blackwell() -> bool:
    """Whether kernels are compiled for Blackwell, where the compiler keeps more in registers.

    Tiles that just fit the registers of other GPUs spill hundreds of bytes there.
    """
    return target_gpu().capability >= (10, 0)


def _swizzle(tokens: int, dim: int, dtype) -> int:
    """Returns the number of bytes of a row of D elements swizzled together in shared memory.

    Tokens pass through registers in tiles of 8 rows of this many bytes, split evenly over the four
    warps.
    """
    row = dim * jnp.dtype(dtype).itemsize
    whole = (s for s in (128, 64, 32) if row % s == 0 and tokens // 8 * (row // s) % 4 == 0)
    return next(whole)


def tile_memory(tokens: int, problem: Problem, piece: int | None = None):
    """Returns shared memory for a tile [tokens, D] that is written in pieces of some tokens."""
    swizzle = _swizzle(piece or tokens, problem.D, problem.dtype)
    tiling = plgpu.TilingTransform((8, swizzle // problem.dtype.itemsize))
    transforms = (tiling, plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM((tokens, problem.D), problem.dtype, transforms=transforms)


def load_tile(ref):
    """Loads [tokens, D] from device memory into registers, in whole cache lines."""
    count, dim = ref.shape
    layout = plgpu.Layout.SMEM_GMEM_COPY(ref.shape, ref.dtype, _swizzle(count, dim, ref.dtype))
    return plgpu.load(ref, layout=layout, optimized=False)


def columns_at(ref):
    """Loads one value per column of a tile from device memory."""
    return plgpu.load(ref, layout=ACC.reduce(0), optimized=False)


def rows_at(ref):
    """Loads one value per row of a tile from device memory."""
    return plgpu.load(ref, layout=ACC.reduce(1), optimized=False)


def full(shape, value: float = 0.0):
    """Returns a tile of sums filled with a value."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), ACC)


def row_vector(rows: int, value: float):
    """Returns one float32 value per row of a tile."""
    return plgpu.layout_cast(jnp.full((rows,), value, jnp.float32), ACC.reduce(1))


def multiply_transposed(problem: Problem, sums, left, right):
    """Returns sums + left @ right^T for tiles [tokens, D] in shared memory, a part of D at a time.

    The parts save registers, in which operands wait for the product.
    """
    for start in range(0, problem.D, PART):
        columns = pl.ds(start, min(PART, problem.D - start))
        a = plgpu.load(left.at[:, columns], layout=LHS)
        b = plgpu.load(right.at[:, columns].transpose((1, 0)), layout=RHS)
        sums = mma(sums, a, b, problem.interpret)
    return sums


def multiply(problem: Problem, sums, weights, tile):
    """Returns sums + weights @ tile for sums of another product and a tile in shared memory."""
    left = as_left(weights, problem.dtype, problem.interpret)
    return mma(sums, left, plgpu.load(tile, layout=RHS), problem.interpret)


def tokens(tile, block: int):
    """Returns the slice of the tokens of a tile."""
    return pl.ds(tile * block, block)


def kv_head_of(problem: Problem, head):
    """Returns the KV head that a query head reads."""
    return lax.div(head, jnp.int32(problem.H // problem.K))


@dataclass(frozen=True)
class Walk:
    """The keys that a tile of queries visits.

    Attributes:
      queries: the slice of the queries.
      place: the index of the first query among the keys.
      bounds: the first tile of keys, then the ends of the zones; see `gpu_tiles.zone_loops`.
      last: the last tile.
      own_segments: the segment of each query, or None.
      segments_at: loads the segment of each key of a tile.
    """

    queries: Any
    place: Any
    bounds: tuple
    last: Any
    own_segments: Any
    segments_at: Callable[[Any], Any]

    def hide(self, scores, tile, distance, hidden: float):
        """Replaces scores of keys that come later (given a distance) or are of other documents."""
        if distance is not None:
            scores = jnp.where(distance >= 0, scores, hidden)
        if self.own_segments is not None:
            same = rows_of(self.own_segments, scores.shape)
            same = same == columns_of(self.segments_at(tile), scores.shape)
            scores = jnp.where(same, scores, hidden)
        return scores


def operands_over_keys(problem: Problem, inputs: Inputs, blocks: Blocks) -> list[jax.Array]:
    """Returns the operands of `walk_over_keys`: segments, first tiles of keys, and the place."""
    operands = []
    if problem.packed:
        own, others = inputs.query_segments, inputs.segments
        overlap = segment_overlap(own, others, blocks.rows, blocks.columns)
        operands += [own, others, jnp.argmax(overlap, axis=-1).astype(jnp.int32)]
    if problem.placed:
        operands.append(inputs.start)
    return operands


def walk_over_keys(problem: Problem, blocks: Blocks, references) -> Walk:
    """Returns the walk of this program; the grid is (batch, heads, queries).

    Queries run backwards, so the longest programs start first.
    """
    segments, rest = segment_references(problem, references)
    batch = lax.axis_index("batch")
    program = problem.T // blocks.rows - 1 - lax.axis_index("queries")
    q0 = program * blocks.rows
    queries = pl.ds(q0, blocks.rows)
    first, own = jnp.int32(0), None
    if problem.packed:
        first = segments[2][batch, program]
        own = rows_at(segments[0].at[batch, queries])

    def segments_at(tile):
        return columns_at(segments[1].at[batch, tokens(tile, blocks.columns)])

    place, count = (rest[0][0], problem.S // blocks.columns) if problem.placed else (0, None)
    zones = key_zones(q0 + place, blocks.rows, problem.window, blocks.columns, first, count)
    return Walk(queries, q0 + place, (first, *zones), zones[-1] - 1, own, segments_at)
