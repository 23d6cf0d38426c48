"""The gather of rows of a store in host memory by a GPU, which reads them in place.

Pinned host memory has an address on the device, so the copy engine of a Hopper GPU reads it like
device memory; each row, or piece of a block of rows, is one transfer. Many small programs keep many
copies in flight. XLA gathers rows in device memory, also in one kernel.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxtyping import Array, Int, Shaped

from pallas_kernels.dispatch import target_gpu
from pallas_kernels.fetch.reference import is_on_host

_ROWS = 16  # the fewest rows per program
_PIECE_BYTES = 16384  # the most bytes per copy
_COPIED_BYTES = 128  # a copy's size is a multiple of this
_MOST_NUMBERS = 256  # per copy along one axis


def why_not(store, index, *, block: int) -> str | None:
    """Returns why this kernel cannot serve a call, or None."""
    del index, block
    gpu, width = target_gpu(), store.shape[1]
    if not is_on_host(store):
        return "reads stores in host memory; this one is in device memory"
    if gpu.capability < (9, 0):
        return f"needs compute capability 9.0 (Hopper), {gpu.kind} has {gpu.capability}"
    if width * store.dtype.itemsize % _COPIED_BYTES or width > _MOST_NUMBERS:
        return (
            f"copies rows of multiples of {_COPIED_BYTES} bytes and at most {_MOST_NUMBERS} "
            f"numbers, not {width} numbers of {store.dtype}"
        )
    if store.dtype.itemsize > 4:
        return f"does not read {store.dtype} stores"
    return None


# Kernels accept only arrays in device memory; this passes a host array without moving it.
_in_place_p = Primitive("read_in_place")
_in_place_p.def_abstract_eval(lambda x: x.update(memory_space=jax.memory.Space.Device))
_in_place_p.def_impl(lambda x: x)
mlir.register_lowering(_in_place_p, lambda context, x: [x])


def fetch_rows_mosaic(
    store: Shaped[Array, "S D"], index: Int[Array, " n"], *, block: int, interpret=None
) -> Shaped[Array, "n_block D"]:
    """Computes `fetch_rows` with the kernel, a copy for each piece of a block."""
    width = store.shape[1]
    piece = piece_of(block, width * store.dtype.itemsize)
    if piece < block:  # all pieces of a negative number are negative
        parts = block // piece
        index = (index[:, None] * parts + jnp.arange(parts, dtype=index.dtype)).reshape(-1)
    copies = max(1, _ROWS // piece)
    programs = -(-index.size // copies)
    nothing = 0 if piece == 1 else -1
    padded = jnp.pad(index, (0, programs * copies - index.size), constant_values=nothing)

    def body(index_ref, store_ref, out_ref, rows_smem, arrived):
        first = lax.axis_index("block") * copies
        for number in range(copies):
            chosen = index_ref[first + number]
            if piece == 1:
                plgpu.copy_gmem_to_smem(store_ref.at[chosen], rows_smem.at[number], arrived)
                continue

            @pl.when(chosen >= 0)
            def _copy(chosen=chosen, number=number):
                source = store_ref.at[pl.ds(chosen * piece, piece)]
                target = rows_smem.at[pl.ds(number * piece, piece)]
                plgpu.copy_gmem_to_smem(source, target, arrived)

            @pl.when(chosen < 0)
            def _skip():
                plgpu.barrier_arrive(arrived)

        plgpu.barrier_wait(arrived)
        plgpu.copy_smem_to_gmem(rows_smem, out_ref.at[pl.ds(first * piece, copies * piece)])
        plgpu.wait_smem_to_gmem(0)

    rows = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((programs * copies * piece, width), store.dtype),
        scratch_types=[
            plgpu.SMEM((copies * piece, width), store.dtype),
            plgpu.Barrier(num_arrivals=copies),
        ],
        grid=(programs,),
        grid_names=("block",),
        interpret=interpret,
        kernel_name="fetch_rows",
    )(padded, _in_place_p.bind(store))
    return rows[: index.size * piece]


def piece_of(block: int, row_bytes: int) -> int:
    """Returns the rows per copy: the most that fit and divide a block."""
    most = min(block, _MOST_NUMBERS, max(1, _PIECE_BYTES // row_bytes))
    return max(piece for piece in range(1, most + 1) if block % piece == 0)
