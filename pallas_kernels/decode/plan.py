"""Splits the work of a ragged decode step among the programs of a GPU kernel (stream-K).

Every row is cut into tiles of `tile` slots; an empty row counts as one tile, which reads nothing
but writes the row's result. All tiles of all rows form one line, and program c owns the stretch
[start(c), start(c + 1)) of it: equal shares for any row lengths, on a grid that does not depend on
them. A row shared by several programs has one partial result per program. The pair (row r, program
c) owns partial slot r + c: from one pair to the next along the line either r or c grows, so these
slots are unique without a list.

    lengths [130, 0, 64], tile 64, programs 3
    tiles       3, 1, 1               # ceil(length / tile), at least 1
    tile_starts 0, 3, 4, 5            # first tile of each row on the line, then the line's end
    stretches   0..2, 2..4, 4..5      # program 0: row 0; program 1: rows 0 and 1; program 2: row 2
    edge_rows   0, 0, 2,   0, 1, 2    # rows of the first tiles, then of the last tiles

The plan depends only on the lengths. One plan serves every kernel of a decode step, and a single
call on lengths [L, R] returns a plan for each layer.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

# Up to this many rows a masked sum over all pairs of rows is one small kernel, cheaper than a scan.
_ROWS_BY_PAIRS = 1024


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodePlan:
    """The split of one decode step, or of several along leading axes.

    Attributes:
      tile_starts: [..., R + 1] first tile of each row on the line, then the number of all tiles.
      edge_rows: [..., 2 C] the row of the first tile of each of the C programs, then the row of the
        last tile of each; the latter is less than the former if a program has no tile.
      tile: number of slots in a tile.
      programs: C, the size of the grid. Both arrays may be longer than needed.
    """

    # Arrays; jax also replaces them by shapes, axes and placeholders.
    tile_starts: Any
    edge_rows: Any
    tile: int = field(metadata={"static": True})
    programs: int = field(metadata={"static": True})


def stretch_start(total, program, programs: int):
    """Returns the first tile of a program's stretch; avoids program * total, which may overflow."""
    share = total // programs
    return program * share + jnp.minimum(program, total - share * programs)


def owner(total, tile, programs: int):
    """Returns the program whose stretch holds a tile: the inverse of `stretch_start`."""
    share = total // programs
    longer = total - share * programs
    tail = tile - longer * (share + 1)
    return jnp.where(tail < 0, tile // (share + 1), longer + tail // jnp.maximum(share, 1))


def make_plan(lengths: Int[Array, "*L R"], *, tile: int, programs: int) -> DecodePlan:
    """Splits rows of these lengths among the programs of a grid.

    Args:
      lengths: number of live slots of each row.
      tile: number of slots in a tile.
      programs: C, the size of the grid.
    """
    lengths = lengths.astype(jnp.int32)
    rows = lengths.shape[-1]
    tiles = jnp.maximum(1, (lengths + (tile - 1)) // tile)
    if rows <= _ROWS_BY_PAIRS:
        before = jnp.arange(rows) < jnp.arange(rows + 1)[:, None]
        tile_starts = jnp.sum(tiles[..., None, :] * before, axis=-1, dtype=jnp.int32)
    else:
        zero = jnp.zeros_like(tiles[..., :1])
        tile_starts = jnp.concatenate([zero, jnp.cumsum(tiles, axis=-1, dtype=jnp.int32)], -1)
    total = tile_starts[..., -1:]
    # One array for both edges takes one kernel fewer than two arrays.
    program = jnp.arange(2 * programs, dtype=jnp.int32)
    last = program >= programs
    edge = stretch_start(total, jnp.where(last, program - (programs - 1), program), programs) - last
    ends = tile_starts[..., None, 1:]
    edge_rows = jnp.sum(ends <= edge[..., None], axis=-1, dtype=jnp.int32)
    return DecodePlan(tile_starts, edge_rows, tile, programs)


def walk_rows(plan_refs, lengths_ref, spec, visit, start_state):
    """Visits the rows of this program's stretch in order, inside a kernel.

    Calls `visit(row, lo, hi, length, whole, state) -> state` where [lo, hi) are the row's live
    tiles in this stretch, and `whole` says whether this program reads the whole row. The start, the
    end and the length of a row are loaded one row ahead.
    """
    tile_starts_ref, edge_rows_ref = plan_refs
    program = lax.axis_index("program")
    total = tile_starts_ref[spec.rows]
    first_row, last_row = edge_rows_ref[program], edge_rows_ref[spec.programs + program]
    start = stretch_start(total, program, spec.programs)
    stop = stretch_start(total, program + 1, spec.programs)

    def bounds(row):
        row = jnp.minimum(row, spec.rows - 1)
        return tile_starts_ref[row], tile_starts_ref[row + 1], lengths_ref[row]

    def step(row, carry):
        (row_start, row_stop, length), state = carry
        following = bounds(row + 1)
        lo = jnp.maximum(start, row_start) - row_start
        hi = jnp.minimum(stop, row_stop) - row_start
        whole = (lo == 0) & (hi == row_stop - row_start)
        live = (length + (spec.tile - 1)) // spec.tile
        state = visit(row, lo, jnp.minimum(hi, live), length, whole, state)
        return following, state

    _, state = lax.fori_loop(first_row, last_row + 1, step, (bounds(first_row), start_state))
    return state
