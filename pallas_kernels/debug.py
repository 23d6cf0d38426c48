"""The bounds check of debug mode: whether a kernel would read outside the pool or the page table.

On concrete arrays it raises before anything is launched; under `jax.jit` it is a `checkify.check`.
"""

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental import checkify
from jaxtyping import Array, Int


def check_pages(
    operation: str,
    page_table: Int[Array, "R M"],
    lengths: Int[Array, " R"],
    pages: int,
    page_size: int,
) -> None:
    """Refuses live table entries outside the pool, and lengths outside the table.

    Args:
      operation: name of the operation whose arguments these are, for the messages.
      page_table: page numbers of each row.
      lengths: number of live slots of each row.
      pages: number of pages in the pool.
      page_size: number of slots in a page.

    Raises:
      ValueError: a page or a length is out of range.
    """
    slots = page_table.shape[1] * page_size
    live = jnp.arange(page_table.shape[1]) * page_size < lengths[:, None]
    bad_page = live & ((page_table < 0) | (page_table >= pages))
    bad_length = (lengths < 0) | (lengths > slots)
    if isinstance(bad_page, Tracer) or isinstance(bad_length, Tracer):
        checkify.check(~bad_length.any(), f"{operation}: a length is not in 0..{slots}")
        checkify.check(~bad_page.any(), f"{operation}: a live page is not in 0..{pages - 1}")
        return
    if bad_length.any():
        row = int(np.argmax(np.asarray(bad_length)))
        raise ValueError(
            f"{operation}: length {int(lengths[row])} of row {row} is not in 0..{slots}"
        )
    if bad_page.any():
        row, column = np.argwhere(np.asarray(bad_page))[0]
        raise ValueError(
            f"{operation}: page {int(page_table[row, column])} of row {row}, column {column} "
            f"is not in 0..{pages - 1}"
        )
