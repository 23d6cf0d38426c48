"""The write of one slot of each row in plain XLA: a scatter into every array.

pages[page[r], offset[r]] = new[r]        for rows r whose slot is in the pool
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped


def is_slot(page, offset, pages) -> Bool[Array, "*rows"]:
    """Returns whether a slot exists in each of these arrays."""
    num_pages = min(x.shape[0] for x in pages)
    page_size = pages[0].shape[1]
    return (page >= 0) & (page < num_pages) & (offset >= 0) & (offset < page_size)


def write_pages_xla(
    pages: tuple[Shaped[Array, "..."], ...],
    new: tuple[Shaped[Array, "..."], ...],
    page: Int[Array, " R"],
    offset: Int[Array, " R"],
) -> tuple[Shaped[Array, "..."], ...]:
    """Computes `write_pages` in XLA; returns the arrays of the pool.

    Args:
      pages: arrays to write to, [N, P, ...].
      new: new entries of each array, [R, ...].
      page: page of each row.
      offset: slot of each row in its page.
    """
    # A scatter drops indices past the end, but takes -1 as the last page.
    written = is_slot(page, offset, pages)
    return tuple(
        x.at[jnp.where(written, page, x.shape[0]), offset].set(values, mode="drop")
        for x, values in zip(pages, new, strict=True)
    )
