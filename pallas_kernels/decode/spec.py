"""What the Hopper kernels of decode attention are compiled for."""

import math
from dataclasses import dataclass

import jax.numpy as jnp

LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Spec:
    """What a kernel is compiled for.

    Attributes:
      rows: R.
      group: G.
      head_dim: D.
      page_size: P.
      pages_dtype: dtype of the pages.
      dtype: dtype of the queries and of the result.
      tile: slots handled at a time: a page, or several.
      stages: tiles of keys and of values in flight.
      programs: size of the grid.
      scale: factor of the scores.
      return_lse: write the log-sum-exp of whole rows.
      return_scores: write the scores.
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

    @property
    def pages_a_tile(self) -> int:
        """Pages handled at a time."""
        return self.tile // self.page_size

    @property
    def copies_a_page(self) -> int:
        """Arrivals that tell that a page is there."""
        return 1 + self.scaled

    @property
    def columns(self) -> int:
        """N: the group, padded to what the matrix unit takes."""
        return 8 if self.group <= 8 else 16

    @property
    def operand(self) -> jnp.dtype:
        """What the matrix unit multiplies."""
        return jnp.dtype(jnp.float16 if self.dtype == jnp.float16 else jnp.bfloat16)

    @property
    def convert(self) -> bool:
        """Whether pages must be converted to operands."""
        return self.pages_dtype != self.operand

    @property
    def parts(self) -> int:
        """Operands whose sum is a page."""
        return 3 if self.pages_dtype == jnp.float32 else 1

    @property
    def scaled(self) -> bool:
        """Whether each slot has its own factor."""
        return self.pages_dtype.itemsize == 1

    @property
    def blocks(self) -> tuple[tuple[int, int], ...]:
        """(start, size) of the blocks of D that O^T is computed in; they may overlap.

        The matrix unit takes 64 rows at a time: 96 is 0..63 and 32..95.
        """
        if self.head_dim % 64 == 0:
            return ((0, self.head_dim),)
        return ((0, 64), (self.head_dim - 64, 64))

    @property
    def stage_values(self) -> bool:
        """Whether values pass through a second buffer: converted, or cut into blocks."""
        return self.convert or len(self.blocks) > 1

    @property
    def share_stage(self) -> bool:
        """Whether converted keys and values take turns in one buffer."""
        return self.convert and len(self.blocks) == 1

    @property
    def out_rows(self) -> int:
        """Rows of O^T over all blocks."""
        return sum(size for _, size in self.blocks)

    @property
    def transposed(self) -> bool:
        """Whether results are written as O^T, [R, out_rows, N], and turned afterwards.

        Registers can be stored turned if they are 16 bits wide; overlapping blocks would race.
        """
        return self.dtype.itemsize != 2 or len(self.blocks) > 1

    @property
    def shared_bytes(self) -> int:
        """Shared memory of one program, roughly."""
        page = self.tile * self.head_dim * self.pages_dtype.itemsize
        ring = 2 * self.stages * (page + (4 * self.tile if self.scaled else 0))
        widths = self.convert * self.head_dim
        widths += (self.stage_values and not self.share_stage) * self.out_rows
        staged = 2 * self.parts * self.tile * widths
        heads = self.columns * self.head_dim * 2 * (2 * self.parts + 1)
        return ring + staged + heads + 2 * self.parts * self.columns * self.tile + 8192
