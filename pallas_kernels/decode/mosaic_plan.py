"""The plan of a decode step (see `plan`) in one launch, for Hopper GPUs.

XLA computes a plan in four kernels, and a decode step needs one per layer. Here every program
counts the tiles before each row, 64 rows at a time, and then finds 64 of the rows in which
stretches begin or end; the first program also writes `tile_starts`.

    starts[r] = sum_{j < r} tiles[j]        edge_rows[c] = |{r : starts[r] <= edge tile of c}| - 1
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode.plan import DecodePlan, stretch_start

# Number of rows, or edges, processed at a time: as many as one instruction's registers hold.
_CHUNK = 64
# The maximum number of rows, given by the size of shared memory.
MOST_ROWS = 16384
_SHAPE = (_CHUNK, _CHUNK)
_PER_ROW, _PER_COLUMN = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)


def _chunks(count: int) -> int:
    return -(-count // _CHUNK)


def _index(axis: int):
    return plgpu.broadcasted_iota(jnp.int32, _SHAPE, axis, layout=plgpu.Layout.WGMMA)


def _load_columns(ref):
    vector = plgpu.load(ref, layout=_PER_COLUMN)
    return lax.broadcast_in_dim(vector, _SHAPE, [1])


def _sum_rows(values, where):
    """Sums the selected values of each row; returns one value per row."""
    return jnp.where(where, values, 0).sum(axis=1)


def make_plan_on_gpu(lengths, *, tile: int, programs: int, interpret=None) -> DecodePlan:
    """Splits rows of these lengths [R] among the programs of a grid, like `plan.make_plan`.

    Args:
      lengths: number of live slots of each row, int32 [R], R at most MOST_ROWS.
      tile: number of slots in a tile.
      programs: C, the size of the grid.
      interpret: parameters of the interpreter, for tests.

    Returns:
      The plan, with arrays that are longer than needed.
    """
    (rows,) = lengths.shape
    row_chunks, edge_chunks = _chunks(rows + 1), _chunks(2 * programs)
    if interpret is not None:
        # The interpreter does not fill boxes that extend past the end of an array.
        lengths = jnp.pad(lengths, (0, row_chunks * _CHUNK - rows))

    def body(lengths_ref, starts_ref, edges_ref, *, lengths_smem, starts_smem, edges_smem, loaded):
        program = lax.axis_index("program")
        if interpret is None:
            # The attention kernel may be launched while this one ends; it waits in the same way.
            plgpu.griddepcontrol_wait()
            plgpu.griddepcontrol_launch_dependents()
        for chunk in range(row_chunks):
            # A box with a traced start may extend past the end; zeros arrive from there.
            part = pl.ds(program * 0 + chunk * _CHUNK, _CHUNK)
            plgpu.copy_gmem_to_smem(
                lengths_ref.at[part],
                lengths_smem.at[chunk],
                loaded,
                oob_mode=plgpu.OOBFillMode.ZEROS,
            )
        plgpu.barrier_wait(loaded)
        row, column = _index(0), _index(1)
        nothing = plgpu.layout_cast(jnp.zeros((_CHUNK,), jnp.int32), _PER_ROW)

        def line(chunk, before):
            tiles = lax.div(_load_columns(lengths_smem.at[chunk]) + (tile - 1), jnp.int32(tile))
            tiles = jnp.maximum(tiles, 1)
            real = column + chunk * _CHUNK < rows
            starts_smem.at[chunk][...] = before + _sum_rows(tiles, real & (column < row))
            return before + _sum_rows(tiles, real)

        total = lax.fori_loop(0, row_chunks, line, nothing)
        plgpu.commit_smem()

        @pl.when(program == 0)
        def _():
            for chunk in range(row_chunks):
                part = pl.ds(chunk * _CHUNK, _CHUNK)
                plgpu.copy_smem_to_gmem(starts_smem.at[chunk], starts_ref.at[part])

        edge = _sum_rows(row, column == 0) + program * _CHUNK
        last = edge >= programs
        stretch = jnp.where(last, edge - (programs - 1), edge)
        edge_tile = stretch_start(total, stretch, programs) - jnp.where(last, 1, 0)
        edge_tile = lax.broadcast_in_dim(edge_tile, _SHAPE, [0])

        def count(chunk, counted):
            met = _load_columns(starts_smem.at[chunk]) <= edge_tile
            met &= column + chunk * _CHUNK <= rows
            return counted + _sum_rows(jnp.ones_like(edge_tile), met)

        edges_smem[...] = lax.fori_loop(0, row_chunks, count, nothing) - 1
        plgpu.commit_smem()
        part = pl.ds(program * _CHUNK, _CHUNK)
        plgpu.copy_smem_to_gmem(edges_smem, edges_ref.at[part])
        plgpu.wait_smem_to_gmem(0)

    kernel = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((row_chunks * _CHUNK,), jnp.int32),
            jax.ShapeDtypeStruct((edge_chunks * _CHUNK,), jnp.int32),
        ),
        scratch_types={
            "lengths_smem": plgpu.SMEM((row_chunks, _CHUNK), jnp.int32),
            "starts_smem": plgpu.SMEM((row_chunks, _CHUNK), jnp.int32),
            "edges_smem": plgpu.SMEM((_CHUNK,), jnp.int32),
            "loaded": plgpu.Barrier(num_arrivals=row_chunks),
        },
        grid=(edge_chunks,),
        grid_names=("program",),
        interpret=interpret,
        kernel_name="decode_plan",
    )
    # For a slice XLA would pass an address inside an array, which bulk copies may reject.
    starts, edges = kernel(lax.optimization_barrier(lengths))
    return DecodePlan(starts, edges, tile, programs)
