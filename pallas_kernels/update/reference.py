"""Writing one slot of each row in plain XLA: a scatter into every array, in place where it can be.

pages[page[r], offset[r]] = new[r]        for rows r whose slot exists
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def is_slot(page, offset, pages) -> Bool[Array, "*rows"]:
    """Whether every one of these arrays has that slot."""
    num_pages = min(x.shape[0] for x in pages)
    page_size = pages[0].shape[1]
    return (page >= 0) & (page < num_pages) & (offset >= 0) & (offset < page_size)


def write_pages_xla(
    pages: tuple[Float[Array, "..."], ...],
    new: tuple[Float[Array, "..."], ...],
    page: Int[Array, " R"],
    offset: Int[Array, " R"],
) -> tuple[Float[Array, "..."], ...]:
    """Serve as the XLA form of `write_pages`.

    Args:
      pages: what is written to, [N, P, D] or [N, P].
      new: what is written into each, [R, D] or [R].
      page: the page of each row.
      offset: its slot in that page.
    """
    # What lies outside is dropped, but -1 would be the last page.
    written = is_slot(page, offset, pages)
    return tuple(
        x.at[jnp.where(written, page, x.shape[0]), offset].set(values, mode="drop")
        for x, values in zip(pages, new, strict=True)
    )
