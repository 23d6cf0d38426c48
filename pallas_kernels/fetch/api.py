"""`fetch_rows`: gathers rows, or blocks of them, of a store in device memory or in host memory.

On a GPU a kernel reads a store in `pinned_host` memory in place, over the link: only the requested
rows are transferred, and the host dispatches nothing. An H200 fetched 8 MB in rows of 256 bytes at
38 GB/s this way, and at 8 GB/s with the CPU gathering (`experiments/results/kernels/fetch.json`).
"""

import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from pallas_kernels.dispatch import Implementation, Operation, deferred
from pallas_kernels.fetch.reference import fetch_rows_xla

OPERATION = Operation(
    "fetch_rows",
    (
        deferred("mosaic_gpu", "cuda", "pallas_kernels.fetch.gpu", "fetch_rows_mosaic"),
        Implementation("xla", None, fetch_rows_xla),
    ),
)


def fetch_rows(
    store: Shaped[Array, "S D"],
    index: Int[Array, " n"],
    *,
    block: int = 1,
    implementation: str | None = None,
) -> Shaped[Array, "n_block D"]:
    """Gathers rows, or blocks of consecutive rows, into device memory.

    Args:
      store: the rows, in device memory or in `pinned_host`, read when the program runs.
      index: numbers of the blocks: block i has the rows from i * block on. The result for a block
        outside the store is undefined; negative numbers are not transferred.
      block: rows of a block, S or a divisor of it.
      implementation: "mosaic_gpu" or "xla"; None chooses the best one for the platform that the
        call is lowered for.

    Returns:
      The rows in the order of their blocks, in device memory.

    Raises:
      ValueError: arguments disagree.
      NotImplementedError: the implementation cannot serve the call, with the reason.
    """
    if store.ndim != 2 or index.ndim != 1 or 0 in store.shape:
        raise ValueError(
            f"fetch_rows: store must be [S, D] with S, D > 0 and index [n], got {store.shape} and "
            f"{index.shape}"
        )
    if not jnp.issubdtype(index.dtype, jnp.integer):
        raise ValueError(f"fetch_rows: index must hold integers, has dtype {index.dtype}")
    if block < 1 or store.shape[0] % block:
        raise ValueError(f"fetch_rows: {store.shape[0]} rows are not blocks of {block}")
    if index.size == 0:
        return jnp.zeros((0, store.shape[1]), store.dtype)
    return OPERATION(implementation, store, index.astype(jnp.int32), block=block)
