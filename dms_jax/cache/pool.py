"""The paged pool: one store of keys and values for all layers, sequences and KV heads.

A row is one (layer, sequence, KV head). It owns a list of pages of P slots and a length, and grows
by itself: slot s of row (l, b, k) is pool[page_table[l, b, k, s // P], s % P]. Only the last page
of a row is ever partial, and nothing is padded to the longest row.

Under a mesh, rows are split over devices, each device holds its own pages, and page numbers are
local to it.
"""

from typing import Any, no_type_check

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int


@no_type_check  # jax also builds it of shapes and of partitions
@struct.dataclass
class Cache:
    """All that generation carries from step to step.

    Attributes:
      k_pages, v_pages: the pool; keys are rotated.
      page_table: the pages of each row; entries beyond its reserve are N (no page).
      lengths: slots in use per row.
      seen: tokens each sequence has seen, which is the position of its next one.
      row_state: what the policy remembers per row, leaves [L, B, K, ...].
      page_state: what the policy remembers per page, leaves [N, ...].
    """

    k_pages: Float[Array, "N P D"]
    v_pages: Float[Array, "N P D"]
    page_table: Int[Array, "L B K M"]
    lengths: Int[Array, "L B K"]
    seen: Int[Array, " B"]
    row_state: Any = ()
    page_state: Any = ()

    @property
    def page_size(self) -> int:
        """Slots a page."""
        return self.k_pages.shape[1]


def store(
    pages: Float[Array, "N P D"],
    page_table: Int[Array, "B K M"],
    slots: Int[Array, "B K T"],
    values: Float[Array, "B T K D"],
) -> Float[Array, "N P D"]:
    """Writes `values` into the rows' slots; a negative slot is not written.

    No two tokens of a row may name the same slot. A slot beyond the row's reserve addresses no
    page and is not written either: the host reserves before it runs and checks lengths after.
    """
    num_pages, page_size, _ = pages.shape
    page = jnp.take_along_axis(
        page_table, jnp.maximum(slots, 0) // page_size, axis=-1, mode="fill", fill_value=num_pages
    )
    page = jnp.where(slots < 0, num_pages, page)
    return pages.at[page, slots % page_size].set(
        jnp.swapaxes(values, 1, 2).astype(pages.dtype), mode="drop"
    )
