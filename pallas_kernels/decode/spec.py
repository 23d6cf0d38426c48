"""The static parameters of the Hopper kernels of decode attention."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.shared_memory import REDUCTION_BYTES, laid_out

LOG2_E = math.log2(math.e)
# The initial running maximum: below every score, with finite differences, unlike -inf.
LOWEST = -1e30
# The smallest log2 of a value's scale that counts: 2^100 token weights still sum to a float32.
LEAST_SCALE = -100.0
# Factor between the operands that sum to float8 queries; each has three significant bits.
QUERY_STEP = 2.0**-3
# Number of converted tiles of float8 values in memory.
CONVERTED = 2


# The largest group that kernels for GPUs serve, padded (`Spec.columns`).
MOST_COLUMNS = 16


def mma_operands(tile: int, head_dim: int, columns: int) -> tuple[tuple[int, int], ...]:
    """Returns the shapes of the shared-memory arrays of a program with Ampere's products.

    These are 16-bit numbers: the queries, the keys and the values of a tile, and its weights.
    """
    return (columns, head_dim), (tile, head_dim), (tile, head_dim), (tile, columns)


def mma_bytes(tile: int, head_dim: int, columns: int) -> int:
    """Returns the shared memory of a program with Ampere's products."""
    operands = mma_operands(tile, head_dim, columns)
    return laid_out(2 * rows * width for rows, width in operands) + REDUCTION_BYTES


@dataclass(frozen=True)
class Spec:
    """The static parameters of a kernel.

    Attributes:
      rows: R, the number of rows.
      group: G, the number of query heads of a row.
      head_dim: D, the head dim.
      page_size: P, the number of slots in a page.
      pages_dtype: dtype of the pages.
      dtype: dtype of the queries and of the result.
      tile: number of slots processed at a time: one page, or several.
      stages: number of tiles of keys, and of values, in flight.
      programs: size of the grid.
      scale: factor on the scores.
      return_lse: write the log-sum-exp of whole rows.
      return_scores: write the scores.
      copies: use Hopper's copy engine, and launch kernels while the previous ones end.
    """

    rows: int
    group: int
    head_dim: int
    page_size: int
    pages_dtype: jnp.dtype
    dtype: jnp.dtype
    tile: int
    stages: int
    programs: int
    scale: float
    return_lse: bool
    return_scores: bool
    copies: bool = True

    @property
    def pages_a_tile(self) -> int:
        """Number of pages in a tile."""
        return self.tile // self.page_size

    @property
    def copies_a_page(self) -> int:
        """Number of barrier arrivals per page: its own copy, and that of its scales."""
        return 1 + self.scaled

    @property
    def columns(self) -> int:
        """N, the size of the group padded to a size that the matrix unit accepts."""
        return 8 if self.group <= 8 else MOST_COLUMNS

    @property
    def operand(self) -> jnp.dtype:
        """Dtype of weights and values, and of keys and queries unless pages are float8.

        Hopper converts two float8 numbers to float16 in one instruction, to bfloat16 in four.
        """
        half = self.scaled or self.dtype == jnp.float16
        return jnp.dtype(jnp.float16 if half else jnp.bfloat16)

    @property
    def query_parts(self) -> int:
        """Number of operands that sum to the queries: three of 3 significant bits hold 11."""
        return 3 if self.scaled else 1

    @property
    def query(self) -> jnp.dtype:
        """Dtype of the operands that sum to the queries."""
        return jnp.dtype(jnp.float8_e5m2) if self.scaled else self.operand

    @property
    def scaled(self) -> bool:
        """Whether each slot has its own factor."""
        return self.pages_dtype.itemsize == 1

    @property
    def blocks(self) -> tuple[tuple[int, int], ...]:
        """(start, size) of the blocks of D in which O^T is computed; they may overlap.

        The matrix unit takes 64 rows at a time: a head dim of 96 is cut into 0..63 and 32..95.
        """
        if self.head_dim % 64 == 0:
            return ((0, self.head_dim),)
        return ((0, 64), (self.head_dim - 64, 64))

    @property
    def stage_values(self) -> bool:
        """Whether values pass through a second buffer, to be converted or cut into blocks."""
        return self.scaled or len(self.blocks) > 1

    @property
    def out_rows(self) -> int:
        """Number of rows of O^T, summed over all blocks."""
        return sum(size for _, size in self.blocks)

    @property
    def transposed(self) -> bool:
        """Whether results are written as O^T, [R, out_rows, N], and transposed afterwards.

        The copy engine stores transposed registers, and overlapping blocks would race.
        """
        return not self.copies or len(self.blocks) > 1

    def results(self, slots: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns the results of the attention kernel for tables of this many slots.

        They are O or O^T of rows that one program reads whole (others are left unwritten), their
        base-2 lse [R, N], partial results [R + C, out_rows, N], their base-2 lse [R + C, N], and
        base-2 scores [R, slots padded to whole tiles, N].
        """
        whole = (self.rows, self.group, self.head_dim)
        if self.transposed:
            whole = (self.rows, self.out_rows, self.columns)
        partials = self.rows + self.programs
        scores = (self.rows, -(-slots // self.tile) * self.tile) if self.return_scores else (1, 1)
        others = (
            (self.rows, self.columns),
            (partials, self.out_rows, self.columns),
            (partials, self.columns),
            (*scores, self.columns),
        )
        return (
            jax.ShapeDtypeStruct(whole, self.dtype),
            *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in others),
        )

    @property
    def shared_bytes(self) -> int:
        """Shared memory of one program in bytes; up to 8 KB too high for the Hopper kernel."""
        if not self.copies:
            return mma_bytes(self.tile, self.head_dim, self.columns)
        page = self.tile * self.head_dim * self.pages_dtype.itemsize
        ring = 2 * self.stages * (page + (4 * self.tile if self.scaled else 0))
        staged = 2 * self.tile * self.stage_values * self.out_rows
        staged *= CONVERTED if self.scaled else 1
        queries = 2 * self.query_parts * self.query.itemsize
        heads = self.columns * self.head_dim * (queries + 2)
        return ring + staged + heads + 2 * self.columns * self.tile + 8192
