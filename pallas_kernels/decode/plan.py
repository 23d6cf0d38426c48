"""How the work of a ragged decode step is split among the programs of a GPU kernel.

Every row is cut into tiles of `tile` slots; an empty row counts as one tile, which reads nothing
but writes the row's result. All tiles of all rows form one line, and program c owns the stretch
[starts[c], starts[c + 1]): equal shares, whatever the rows' lengths, on a grid that does not
depend on them (stream-K). A row that several programs meet leaves one partial result a program.
The pair (row r, program c) owns partial slot r + c: along the line either r or c grows at each new
pair, so these numbers are unique and need no list.

    lengths [130, 0, 64], tile 64, programs 3
    tiles       3, 1, 1               # ceil(length / tile), at least 1
    tile_starts 0, 3, 4, 5            # where each row begins on the line
    starts      0, 2, 4, 5            # program 0: row 0; program 1: rows 0 and 1; program 2: row 2

The plan depends on lengths alone. One plan serves every kernel of a decode step, and a plan of
lengths [L, R], made in one go, gives each layer its own.
"""

from dataclasses import dataclass, field

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
      starts: first tile of each of C programs on the line, and the number of tiles.
      first_row: row that holds a program's first tile.
      last_row: row that holds its last tile; less than `first_row` where it has no tile.
      tile_starts: first tile of each row, and the number of tiles.
      tile: slots of a tile.
    """

    starts: Int[Array, "*L C+1"]
    first_row: Int[Array, "*L C"]
    last_row: Int[Array, "*L C"]
    tile_starts: Int[Array, "*L R+1"]
    tile: int = field(metadata={"static": True})

    @property
    def programs(self) -> int:
        """C."""
        return self.first_row.shape[-1]


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
    # Written without c * total, which would overflow for long lines.
    share, extra = jnp.divmod(tile_starts[..., -1:], programs)
    program = jnp.arange(programs + 1, dtype=jnp.int32)
    starts = program * share + jnp.minimum(program, extra)
    edges = jnp.concatenate([starts[..., :-1], starts[..., 1:] - 1], axis=-1)
    ends = tile_starts[..., None, 1:]
    edge_rows = jnp.sum(ends <= edges[..., None], axis=-1, dtype=jnp.int32)
    first_row, last_row = edge_rows[..., :programs], edge_rows[..., programs:]
    return DecodePlan(starts, first_row, last_row, tile_starts, tile)
