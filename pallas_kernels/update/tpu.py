"""The write of one slot of each row on TPUs.

Device memory is tiled: slots of 16-bit numbers share words. So all slots of a tile are copied to
VMEM, one of them is replaced, and they are copied back. The copies of all rows of a block are in
flight together, and the addresses are in scalar memory.

XLA rotates keys and queries before the kernel.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.update.reference import is_slot, rotated

# Bytes of the rows whose copies are in flight.
_VMEM_BYTES = 4 << 20
# The limit of scalar memory, which holds two addresses per row.
_MOST_ROWS = 32768
_LANES = 128


def _tile_slots(dtype) -> int:
    """Returns the slots of a tile of device memory: 8 of 32 bits, 16 of 16 bits, 32 of 8 bits."""
    return 32 // jnp.dtype(dtype).itemsize


def why_not(pages, new, page, offset, rotation, **static) -> str | None:
    """Returns why the kernel cannot serve a call, or None."""
    del new, offset, rotation, static
    _, page_size, head_dim = pages[0].shape
    dtype = pages[0].dtype
    if dtype not in (jnp.bfloat16, jnp.float32):
        return f"serves bfloat16 and float32, not {dtype}"
    if head_dim % 32 or head_dim > 512:
        return f"serves head dims that are multiples of 32 up to 512, not {head_dim}"
    if page_size % _tile_slots(dtype):
        return f"serves page sizes that are multiples of {_tile_slots(dtype)}, not {page_size}"
    if page.shape[0] > _MOST_ROWS:
        return f"serves at most {_MOST_ROWS} rows, not {page.shape[0]}"
    return None


def _kernel(page_ref, offset_ref, *refs, count: int, rows: int):
    new, refs = refs[:count], refs[2 * count :]
    targets, tiles, (arrived, left) = refs[:count], refs[count : 2 * count], refs[2 * count :]
    block = tiles[0].shape[0]
    size = tiles[0].shape[1]
    first = pl.program_id(0) * block

    def each_row(act):
        def step(index, carry):
            page, offset = page_ref[first + index], offset_ref[first + index]

            @pl.when(is_slot(page, offset, targets))
            def _():
                inside = lax.rem(offset, size)
                slots = pl.ds(pl.multiple_of(offset - inside, size), size)
                for i in range(count):
                    act(i, index, targets[i].at[page, slots], inside)

            return carry

        lax.fori_loop(0, jnp.minimum(block, rows - first), step, 0)

    def copy_in(i, index, place):
        return pltpu.make_async_copy(place, tiles[i].at[index], arrived)

    def copy_out(i, index, place):
        return pltpu.make_async_copy(tiles[i].at[index], place, left)

    def replace(i, index, place, inside):
        old = tiles[i][index]
        slot = lax.broadcasted_iota(jnp.int32, old.shape, 0)
        value = jnp.broadcast_to(new[i][index], old.shape)
        tiles[i][index] = jnp.where(slot == inside, value, old)
        copy_out(i, index, place).start()

    # Copies of one size share a semaphore, so all must have arrived before any tile is read.
    each_row(lambda i, index, place, _: copy_in(i, index, place).start())
    each_row(lambda i, index, place, _: copy_in(i, index, place).wait())
    each_row(replace)
    each_row(lambda i, index, place, _: copy_out(i, index, place).wait())


def write_pages_tpu(pages, new, page, offset, rotation=None, *, zeroed=(), interpret=False):
    """Computes `write_pages` and `rotate_and_write` on TPUs; see `write_pages_xla`."""
    heads = rotated(new[0], rotation, zeroed)
    rows, _, head_dim = heads.shape
    count, size = len(pages), _tile_slots(pages[0].dtype)
    padded_dim = -(-head_dim // _LANES) * _LANES
    # One tile of each array, and the same for the new entries.
    row_bytes = 2 * count * size * padded_dim * pages[0].dtype.itemsize
    block = max(1, min(rows, _VMEM_BYTES // row_bytes))
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    # Each new row gets a separate tile, because rows inside a tile cannot be addressed.
    new = heads[:, -2:-1], heads[:, -1:]
    new_spec = pl.BlockSpec((block, 1, head_dim), lambda i, *_: (i, 0, 0))
    tile = pltpu.VMEM((block, size, head_dim), pages[0].dtype)
    results = tuple(
        pl.pallas_call(
            functools.partial(_kernel, count=count, rows=rows),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=2,
                grid=(-(-rows // block),),
                in_specs=[new_spec] * count + [anywhere] * count,
                out_specs=[anywhere] * count,
                scratch_shapes=[tile] * count + [pltpu.SemaphoreType.DMA] * 2,
            ),
            out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pages],
            input_output_aliases={2 + count + i: i for i in range(count)},
            compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
            interpret=interpret,
            name="write_pages",
        )(page, offset, *new, *pages)
    )
    return results if rotation is None else (heads[:, :-2], *results)
