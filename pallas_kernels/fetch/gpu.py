"""The gather of rows of a store in host memory by a GPU, which reads them in place.

Pinned host memory has an address on the device, so the copy engine of a Hopper GPU reads it as it
reads device memory; each row goes over the link by itself. Many small programs keep many copies in
flight. Rows in device memory are left to XLA, which gathers them in one kernel too.
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

_ROWS = 16  # number of rows per program
_COPIED_BYTES = 128  # a copy's size is a multiple
_MOST_NUMBERS = 256  # of a copy along one axis


def why_not(store, index) -> str | None:
    """Returns why this kernel cannot serve a call, or None."""
    del index
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


# Kernels take arrays in device memory alone: this is the array where it is, for a kernel.
_in_place_p = Primitive("read_in_place")
_in_place_p.def_abstract_eval(lambda x: x.update(memory_space=jax.memory.Space.Device))
_in_place_p.def_impl(lambda x: x)
mlir.register_lowering(_in_place_p, lambda context, x: [x])


def fetch_rows_mosaic(
    store: Shaped[Array, "S D"], index: Int[Array, " n"], *, interpret=None
) -> Shaped[Array, "n D"]:
    """Computes `fetch_rows` with the kernel, one program per block of rows."""
    count, width = index.size, store.shape[1]
    programs = -(-count // _ROWS)
    padded = jnp.pad(index, (0, programs * _ROWS - count))

    def body(index_ref, store_ref, out_ref, rows_smem, arrived):
        first = lax.axis_index("block") * _ROWS
        for row in range(_ROWS):
            source = store_ref.at[index_ref[first + row]]
            plgpu.copy_gmem_to_smem(source, rows_smem.at[row], arrived)
        plgpu.barrier_wait(arrived)
        plgpu.copy_smem_to_gmem(rows_smem, out_ref.at[pl.ds(first, _ROWS)])
        plgpu.wait_smem_to_gmem(0)

    rows = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((programs * _ROWS, width), store.dtype),
        scratch_types=[
            plgpu.SMEM((_ROWS, width), store.dtype),
            plgpu.Barrier(num_arrivals=_ROWS),
        ],
        grid=(programs,),
        grid_names=("block",),
        interpret=interpret,
        kernel_name="fetch_rows",
    )(padded, _in_place_p.bind(store))
    return rows[:count]
