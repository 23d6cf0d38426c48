"""How the work of a ragged decode step is split among the programs of a GPU kernel.

Every row is cut into tiles of `tile` slots; an empty row counts as one tile, which reads nothing
but writes the row's result. All tiles of all rows form one line, and program c owns the stretch
[start(c), start(c + 1)) of it: equal shares, whatever the rows' lengths, on a grid that does not
depend on them (stream-K). A row that several programs meet leaves one partial result a program.
The pair (row r, program c) owns partial slot r + c: along the line either r or c grows at each new
pair, so these numbers are unique and need no list.

    lengths [130, 0, 64], tile 64, programs 3
    tiles       3, 1, 1               # ceil(length / tile), at least 1
    tile_starts 0, 3, 4, 5            # where each row begins on the line, and its end
    stretches   0..2, 2..4, 4..5      # program 0: row 0; program 1: rows 0 and 1; program 2: row 2
    edge_rows   0, 0, 2,   0, 1, 2    # rows of the first tiles, then of the last tiles

The plan depends on lengths alone. One plan serves every kernel of a decode step, and a plan of
lengths [L, R], made in one go, gives each layer its own.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

# Up to here a masked sum over all pairs of rows is one small kernel, and cheaper than a scan.
_ROWS_BY_PAIRS = 1024


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodePlan:
    """The split of one decode step, or of several along leading axes.

    Attributes:
      tile_starts: [..., R + 1] first tile of each row on the line, and the number of tiles.
      edge_rows: [..., 2 C] the row of each of C programs' first tile, then of each one's last tile;
        the latter is less than the former where a program has no tile.
      tile: slots of a tile.
      programs: C. Both arrays may be longer than it takes.
    """

    # Arrays; jax also puts specs, axes and placeholders in their place.
    tile_starts: Any
    edge_rows: Any
    tile: int = field(metadata={"static": True})
    programs: int = field(metadata={"static": True})


def stretch_start(total, program, programs: int):
    """First tile of a program's stretch; written without program * total, which may overflow."""
    share = total // programs
    return program * share + jnp.minimum(program, total - share * programs)


def owner(total, tile, programs: int):
    """Program whose stretch holds a tile: the inverse of `stretch_start`."""
    share = total // programs
    longer = total - share * programs
    tail = tile - longer * (share + 1)
    return jnp.where(tail < 0, tile // (share + 1), longer + tail // jnp.maximum(share, 1))


def make_plan(lengths: Int[Array, "*L R"], *, tile: int, programs: int) -> DecodePlan:
    """Split rows of these lengths among the programs of a grid.

    Args:
      lengths: live slots of each row.
      tile: slots of a tile.
      programs: programs of the grid, C.
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
    # One array for both edges: a kernel less than two.
    program = jnp.arange(2 * programs, dtype=jnp.int32)
    last = program >= programs
    edge = stretch_start(total, jnp.where(last, program - (programs - 1), program), programs) - last
    ends = tile_starts[..., None, 1:]
    edge_rows = jnp.sum(ends <= edge[..., None], axis=-1, dtype=jnp.int32)
    return DecodePlan(tile_starts, edge_rows, tile, programs)
