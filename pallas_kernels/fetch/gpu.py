"""The gather of rows by a GPU, from its own memory, or in place from host memory.

Pinned host memory has an address on the device, so a kernel loads from it as from device memory;
each load of a row goes over the link by itself. Many small programs keep many loads in flight.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Int, Shaped

from pallas_kernels.dispatch import target_gpu, triton_lacks

_ROWS = 16  # number of rows per program


def why_not(store, index) -> str | None:
    """Returns why this kernel cannot serve a call, or None."""
    del index
    width = store.shape[1]
    if width & (width - 1):
        return f"rows of {width} numbers: the number must be a power of two"
    if store.dtype == jnp.float64:
        return "does not read float64 stores"
    return triton_lacks(target_gpu(), store)


def fetch_rows_triton(
    store: Shaped[Array, "S D"], index: Int[Array, " n"], *, interpret: bool = False
) -> Shaped[Array, "n D"]:
    """Computes `fetch_rows` with the Triton kernel, one program per block of rows."""
    count, width = index.size, store.shape[1]
    programs = -(-count // _ROWS)
    padded = jnp.pad(index, (0, programs * _ROWS - count))

    def kernel(index_ref, store_ref, out_ref):
        block = pl.ds(pl.program_id(0) * _ROWS, _ROWS)
        out_ref[block, :] = store_ref[index_ref[block], :]

    rows = pl.pallas_call(
        kernel,
        grid=(programs,),
        out_shape=jax.ShapeDtypeStruct((programs * _ROWS, width), store.dtype),
        compiler_params=plt.CompilerParams(num_warps=4),
        interpret=interpret,
        name="fetch_rows_triton",
    )(padded, store)
    return rows[:count]
