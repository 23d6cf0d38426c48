"""The paged pool: one store of keys and values for all layers, sequences and KV heads.

A row is one (layer, sequence, KV head). It owns a list of pages of P slots and a length, and grows
by itself: slot s of row (l, b, k) is pool[page_table[l, b, k, s // P], s % P]. Only the last page
of a row is ever partial, and nothing is padded to the longest row.

A pool of float8 numbers has a scale for each slot's key and value (`quantization`).

Under a mesh, rows are split over devices, each device holds its own pages, and page numbers are
local to it.
"""

import dataclasses
from typing import Any, no_type_check

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from dms_jax.cache.quantization import dequantize, is_quantized, quantize, snap


@no_type_check  # jax also builds it of shapes and of partitions
@struct.dataclass
class Pool:
    """Keys (rotated) and values of every row, by page."""

    k_pages: Float[Array, "N P D"]
    v_pages: Float[Array, "N P D"]
    k_scales: Float[Array, "N P"] | None = None
    v_scales: Float[Array, "N P"] | None = None

    @property
    def page_size(self) -> int:
        """Slots a page."""
        return self.k_pages.shape[1]

    @property
    def quantized(self) -> bool:
        """Whether its numbers are float8."""
        return is_quantized(self.k_pages.dtype)

    def as_stored(self, x: Float[Array, "B T K D"]) -> Float[Array, "B T K D"]:
        """What keys or values will be once they went through the pool."""
        return snap(x) if self.quantized else x

    def store(
        self,
        page_table: Int[Array, "B K M"],
        slots: Int[Array, "B K T"],
        k: Float[Array, "B T K D"],
        v: Float[Array, "B T K D"],
    ) -> "Pool":
        """Writes keys and values into the rows' slots; a negative slot is not written."""
        if not self.quantized:
            return dataclasses.replace(
                self,
                k_pages=store(self.k_pages, page_table, slots, k),
                v_pages=store(self.v_pages, page_table, slots, v),
            )
        written = {}
        for name, x in (("k", k), ("v", v)):
            for part, array in zip(("pages", "scales"), quantize(x), strict=True):
                field = f"{name}_{part}"
                written[field] = store(getattr(self, field), page_table, slots, array)
        return dataclasses.replace(self, **written)

    def keys(self, page: Int[Array, "*shape"], dtype: Any) -> Float[Array, "*shape P D"]:
        """The keys of these pages; those of any page where a number is none."""
        keys = self.k_pages.at[page].get(mode="clip")
        if self.k_scales is None:
            return keys
        return dequantize(keys, self.k_scales.at[page].get(mode="clip"), dtype)

    def readable(self, page_table: Int[Array, "B K M"], dtype: Any) -> tuple[Array, Array, Array]:
        """(keys, values, table) in a type that every kernel reads.

        The pool itself, or a copy of the rows' pages where it holds float8 numbers: as much as
        one layer's share of the pool would take in the model's type.
        """
        if not self.quantized:
            return self.k_pages, self.v_pages, page_table
        page = page_table.reshape(-1)
        values = dequantize(
            self.v_pages.at[page].get(mode="clip"), self.v_scales.at[page].get(mode="clip"), dtype
        )
        table = jnp.arange(page.size, dtype=page_table.dtype).reshape(page_table.shape)
        return self.keys(page, dtype), values, table


@no_type_check  # jax also builds it of shapes and of partitions
@struct.dataclass
class Cache:
    """All that generation carries from step to step.

    Attributes:
      pool: keys and values.
      page_table: the pages of each row; entries beyond its reserve are N (no page).
      lengths: slots in use per row.
      seen: tokens each sequence has seen, which is the position of its next one.
      row_state: what the policy remembers per row, leaves [L, B, K, ...].
      page_state: what the policy remembers per page, leaves [N, ...].
    """

    pool: Pool
    page_table: Int[Array, "L B K M"]
    lengths: Int[Array, "L B K"]
    seen: Int[Array, " B"]
    row_state: Any = ()
    page_state: Any = ()

    @property
    def k_pages(self) -> Float[Array, "N P D"]:
        """Keys of the pool."""
        return self.pool.k_pages

    @property
    def v_pages(self) -> Float[Array, "N P D"]:
        """Values of the pool."""
        return self.pool.v_pages

    @property
    def page_size(self) -> int:
        """Slots a page."""
        return self.pool.page_size


def store(
    pages: Float[Array, "N P *tail"],
    page_table: Int[Array, "B K M"],
    slots: Int[Array, "B K T"],
    values: Float[Array, "B T K *tail"],
) -> Float[Array, "N P *tail"]:
    """Writes `values` into the rows' slots; a negative slot is not written.

    No two tokens of a row may name the same slot. A slot beyond the row's reserve addresses no
    page and is not written either: the host reserves before it runs and checks lengths after.
    """
    num_pages, page_size = pages.shape[:2]
    page = jnp.take_along_axis(
        page_table, jnp.maximum(slots, 0) // page_size, axis=-1, mode="fill", fill_value=num_pages
    )
    page = jnp.where(slots < 0, num_pages, page)
    return pages.at[page, slots % page_size].set(
        jnp.swapaxes(values, 1, 2).astype(pages.dtype), mode="drop"
    )
