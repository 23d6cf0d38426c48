"""Values in host memory (KCache): a store that compiled programs read and the host writes.

A program cannot write the store that it reads: carried through a loop, the store would be copied in
every iteration (measured: 39 ms for 268 MB). So it is read-only inside a program, and a `Tail` on
the device holds the values of the program's own tokens, a few per row:

    program   reads store[page, offset], or the tail if that holds a newer value of the slot
    host      between programs: store[page, offset] = tail, in order, so that the last one wins

On a GPU the store is `pinned_host` memory, read in place by a kernel (`pallas_kernels.fetch_rows`).
"""

import ctypes
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Int, Shaped

from dms_jax.sharding import axes
from pallas_kernels import fetch_rows


@no_type_check  # jax also builds it from shapes and partitions
@struct.dataclass
class Tail:
    """The values of a program's own tokens, up to C per row.

    Attributes:
      values: the values, in the dtype of the store.
      slots: slot of each value in its row; negative for no value.
      start: position of the first value in each sequence.
    """

    values: Shaped[Array, "L B K C D"] = struct.field(
        metadata=axes("layers", "sequences", "kv_heads")
    )
    slots: Int[Array, "L B K C"] = struct.field(metadata=axes("layers", "sequences", "kv_heads"))
    start: Int[Array, " B"] = struct.field(metadata=axes("sequences"))

    @classmethod
    def empty(
        cls, rows: tuple[int, ...], length: int, head_dim: int, dtype: Any, start: Array
    ) -> "Tail":
        """Returns an empty tail for a program of `length` tokens per row."""
        return cls(
            values=jnp.zeros((*rows, length, head_dim), dtype),
            slots=jnp.full((*rows, length), -1, jnp.int32),
            start=start,
        )

    def append(
        self,
        layer: Int[Array, ""],
        positions: Int[Array, "B T"],
        values: Shaped[Array, "B T K D"],
        slots: Int[Array, "B K T"],
    ) -> "Tail":
        """Returns the tail with the values of a chunk of one layer added."""
        at = (
            layer,
            jnp.arange(len(positions))[:, None],
            slice(None),
            positions - self.start[:, None],
        )
        return Tail(
            values=self.values.at[at].set(values.astype(self.values.dtype), mode="drop"),
            slots=self.slots.at[at].set(jnp.swapaxes(slots, 1, 2), mode="drop"),
            start=self.start,
        )

    def newest(
        self, layer: Int[Array, ""], slots: Int[Array, "B K n"]
    ) -> tuple[Shaped[Array, "B K n D"], Bool[Array, "B K n"]]:
        """Returns the newest value of each slot, and whether the tail holds one."""
        own = self.slots[layer]
        index = jnp.arange(1, own.shape[-1] + 1)
        last = jnp.where(slots[..., None] == own[:, :, None], index, 0).max(-1)
        at = jnp.maximum(last - 1, 0)[..., None]
        return jnp.take_along_axis(self.values[layer], at, axis=2), last > 0


@no_type_check  # jax also builds it from shapes and partitions
@struct.dataclass
class HostRows:
    """The store as a program sees it.

    Attributes:
      rows: one value per slot of the pages in host memory, in the order of the pages.
      first_page: the first page with values in host memory; values of earlier pages are on the
        device (KCache's first layers).
    """

    rows: Shaped[Array, "S D"]
    first_page: int = struct.field(pytree_node=False)

    def fetch(
        self, page: Int[Array, "*shape"], offset: Int[Array, "*shape"], page_size: int
    ) -> Shaped[Array, "*shape D"]:
        """Returns the values of single slots; arbitrary for an invalid page number."""
        flat = (page - self.first_page) * page_size + offset
        flat = jnp.clip(flat, 0, self.rows.shape[0] - 1).reshape(-1)
        return fetch_rows(self.rows, flat).reshape(*page.shape, -1)

    def fetch_pages(self, page: Int[Array, " n"], page_size: int) -> Shaped[Array, "n P D"]:
        """Returns the values of whole pages; arbitrary for a page that is not on the host."""
        own = page - self.first_page
        own = jnp.where((own >= 0) & (own < self.rows.shape[0] // page_size), own, -1)
        values = fetch_rows(self.rows, own, block=page_size)
        return values.reshape(page.size, page_size, -1)

    def fetch_slots(
        self,
        tail: Tail,
        layer: Int[Array, ""],
        page_table: Int[Array, "B K M"],
        slots: Int[Array, "B K n"],
        page_size: int,
    ) -> Shaped[Array, "B K n D"]:
        """Returns the values of a row's slots, from the tail where that is newer."""
        page = jnp.take_along_axis(page_table, slots // page_size, axis=-1, mode="clip")
        stored = self.fetch(page, slots % page_size, page_size)
        newer, found = tail.newest(layer, slots)
        return jnp.where(found[..., None], newer, stored)


class HostValues:
    """The store, with `num_pages` pages from `first_page` on.

    Attributes:
      rows: the store as an argument of programs; its memory changes between programs.
    """

    def __init__(
        self, *, first_page: int, num_pages: int, page_size: int, head_dim: int, dtype: Any
    ):
        self.page_size = page_size
        place = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
        array = jax.device_put(np.zeros((num_pages * page_size, head_dim), dtype), place)
        self.rows = HostRows(rows=array, first_page=first_page)
        memory = (ctypes.c_uint8 * array.nbytes).from_address(array.unsafe_buffer_pointer())
        self._view = np.frombuffer(memory, dtype).reshape(array.shape)

    @property
    def nbytes(self) -> int:
        """Size of the store in bytes."""
        return self.rows.rows.nbytes

    def write(self, tail: Tail, page_table: Int[np.ndarray, "L B K M"]) -> None:
        """Writes the tail of a finished program into the store; no program may be running.

        Args:
          tail: the tail that the program returned.
          page_table: the page table that the program ran with.
        """
        slots, values = np.asarray(tail.slots), np.asarray(tail.values)
        page = np.take_along_axis(page_table, np.maximum(slots, 0) // self.page_size, axis=-1)
        flat = (page - self.rows.first_page) * self.page_size + slots % self.page_size
        mine = (slots >= 0) & (flat >= 0) & (flat < len(self._view))
        # Of two values for one slot, the later token's comes last and wins.
        self._view[flat[mine]] = values[mine]

    def copy(self, pages: Int[np.ndarray, "2 n"]) -> None:
        """Copies the values of whole pages, (source, target); no program may be running."""
        source, target = pages[:, pages[1] >= self.rows.first_page] - self.rows.first_page
        by_page = self._view.reshape(-1, self.page_size, self._view.shape[-1])
        by_page[target] = by_page[source]

    def delete(self) -> None:
        """Frees the host memory of the store."""
        self._view = np.zeros(0)
        self.rows.rows.delete()
