"""The paged pool: one store of keys and values for all layers, sequences and KV heads.

A row is one (layer, sequence, KV head). It owns a list of pages of P slots and a length, and grows
independently: slot s of row (l, b, k) is pool[page_table[l, b, k, s // P], s % P]. Only the last
page of a row may be partial, and nothing is padded to the longest row.

An 8-bit pool has a scale for each slot's key and value (`quantization`). If values are in host
memory, the pool holds only the values of the first pages and, while a program runs, a tail with the
values of its own tokens (`host_values`).

On a mesh, rows are split over devices, each device holds the pages of its own rows, and page
numbers are local to the device.
"""

import dataclasses
import math
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Shaped

from dms_jax.cache.host_values import HostRows, Tail
from dms_jax.cache.quantization import dequantize, quantize
from dms_jax.ranking import marked_first
from dms_jax.sharding import axes
from pallas_kernels import rotate_and_write, write_pages

# Pages of each row, and numbers of all rows together, that `compact` moves in one iteration.
PAGES_MOVED, NUMBERS_MOVED = 64, 1 << 25


@no_type_check  # jax also builds it from shapes and partitions
@struct.dataclass
class Pool:
    """Keys and values of every row, by page.

    Attributes:
      k_pages: keys after rotary embedding; in 8 bits without their center (`quantization`).
      v_pages: values; only of the first pages if the others are in host memory.
      k_scales, v_scales: the scale of each slot if the pool is quantized.
      tail: values of the running program's tokens if values are in host memory.
    """

    k_pages: Shaped[Array, "N P D"] = struct.field(metadata=axes("pages"))
    v_pages: Shaped[Array, "NV P D"] = struct.field(metadata=axes("pages"))
    k_scales: Float[Array, "N P"] | None = struct.field(default=None, metadata=axes("pages"))
    v_scales: Float[Array, "N P"] | None = struct.field(default=None, metadata=axes("pages"))
    tail: Tail | None = None

    @property
    def page_size(self) -> int:
        """P, the number of slots per page."""
        return self.k_pages.shape[1]

    @property
    def is_quantized(self) -> bool:
        """Whether keys and values are stored in 8 bits."""
        return self.k_scales is not None

    def store(
        self,
        page_table: Int[Array, "B K M"],
        slots: Int[Array, "B K T"],
        k: Float[Array, "B T K D"],
        v: Float[Array, "B T K D"],
        *,
        on_host: tuple[Int[Array, ""], Int[Array, "B T"]] | None = None,
    ) -> "Pool":
        """Writes keys and values into the rows' slots; negative slots are skipped.

        Args:
          page_table: the pages of the rows.
          slots: slot of each token in its row.
          k: keys.
          v: values.
          on_host: (layer, positions of the tokens) if the layer's values are in host memory.
        """
        parts = {"k_pages": k, "v_pages": v}
        if self.is_quantized:
            parts["k_pages"], parts["k_scales"] = quantize(k)
            parts["v_pages"], parts["v_scales"] = quantize(v)
        tail = self.tail
        if on_host is not None:
            assert tail is not None
            tail = tail.append(*on_host, parts.pop("v_pages"), slots)
        elif slots.shape[-1] == 1:
            return self._store_token(page_table, slots, parts)
        written = {
            field: store(getattr(self, field), page_table, slots, x) for field, x in parts.items()
        }
        return dataclasses.replace(self, tail=tail, **written)

    def as_stored(self, x: Float[Array, "B T K D"]) -> Float[Array, "B T K D"]:
        """Returns keys or values as they will be read back."""
        return dequantize(*quantize(x), x.dtype) if self.is_quantized else x

    def _store_token(
        self,
        page_table: Int[Array, "B K M"],
        slots: Int[Array, "B K 1"],
        parts: dict[str, Shaped[Array, "B 1 K ..."]],
    ) -> "Pool":
        """Writes one slot of each row, all arrays in one kernel."""
        rows = slots.size
        new = {
            field: x.reshape(rows, *x.shape[3:]).astype(getattr(self, field).dtype)
            for field, x in parts.items()
        }
        written = write_pages(
            self.k_pages,
            self.v_pages,
            new["k_pages"],
            new["v_pages"],
            *self._places(page_table, slots),
            k_scales=self.k_scales,
            v_scales=self.v_scales,
            k_new_scales=new.get("k_scales"),
            v_new_scales=new.get("v_scales"),
        )
        fields = ("k_pages", "v_pages", "k_scales", "v_scales")
        return dataclasses.replace(self, **dict(zip(fields, written, strict=False)))

    def rotate_and_store(
        self,
        page_table: Int[Array, "B K M"],
        slots: Int[Array, "B K 1"],
        q: Float[Array, "B 1 H D"],
        k: Float[Array, "B 1 K D"],
        v: Float[Array, "B 1 K D"],
        rotation: tuple[Float[Array, "B 1 half"], Float[Array, "B 1 half"]],
        *,
        zeroed: tuple[tuple[int, int], ...] = (),
    ) -> tuple["Pool", Float[Array, "B 1 H D"]]:
        """Rotates queries and keys of one token of each row, and writes keys and values.

        One kernel does both, for an unquantized pool in device memory.

        Args:
          page_table: the pages of the rows.
          slots: slot of the token in its row; negative slots are skipped.
          q, k, v: queries, keys and values before rotation.
          rotation: cos and sin of the tokens' positions.
          zeroed: neurons of a KV head to set to zero, as in `Policy.borrowed`.

        Returns:
          The pool, and the rotated queries.
        """
        # In the order of the projection: if they are parts of one product, XLA recognises the
        # product and copies nothing.
        grouped = q.reshape(*k.shape[:3], -1, k.shape[-1])
        heads = jnp.concatenate([grouped, k[..., None, :], v[..., None, :]], axis=-2)
        cos, sin = rotation
        turned, k_pages, v_pages = rotate_and_write(
            self.k_pages,
            self.v_pages,
            heads.reshape(-1, *heads.shape[-2:]).astype(self.k_pages.dtype),
            (cos[:, 0], sin[:, 0]),
            *self._places(page_table, slots),
            zeroed=zeroed,
        )
        return dataclasses.replace(self, k_pages=k_pages, v_pages=v_pages), turned.reshape(q.shape)

    def _places(
        self, page_table: Int[Array, "B K M"], slots: Int[Array, "B K 1"]
    ) -> tuple[Int[Array, " R"], Int[Array, " R"]]:
        """Returns the page of one slot of each row, and its offset there, -1 for negative slots."""
        page = _page_of(page_table, slots, *self.k_pages.shape[:2])
        offset = jnp.where(slots < 0, -1, slots % self.page_size)
        return page.reshape(-1), offset.reshape(-1)

    def keys(self, page: Int[Array, "*shape"], dtype: Any) -> Float[Array, "*shape P D"]:
        """Returns the keys of these pages; arbitrary for an invalid page number."""
        keys = self.k_pages.at[page].get(mode="clip")
        return self._loaded(keys, self.k_scales, page, dtype)

    def values(
        self, page: Int[Array, "*shape"], offset: Int[Array, "*shape"], dtype: Any
    ) -> Float[Array, "*shape D"]:
        """Returns the values of single slots."""
        values = self.v_pages.at[page, offset].get(mode="clip")
        return self._loaded(values, self.v_scales, (page, offset), dtype)

    def host_values(
        self,
        host: HostRows,
        layer: Int[Array, ""],
        page_table: Int[Array, "B K M"],
        slots: Int[Array, "B K n"],
        dtype: Any,
    ) -> Float[Array, "B K n D"]:
        """Returns the values of single slots of a layer whose values are in host memory."""
        assert self.tail is not None
        values = host.fetch_slots(self.tail, layer, page_table, slots, self.page_size)
        page = jnp.take_along_axis(page_table, slots // self.page_size, axis=-1, mode="clip")
        return self._loaded(values, self.v_scales, (page, slots % self.page_size), dtype)

    def readable(
        self, page_table: Int[Array, "B K M"], dtype: Any, host: HostRows | None = None
    ) -> tuple[Array, Array, Array]:
        """Returns (keys, values, page table) in device memory, in a dtype that every kernel reads.

        They are the pool's arrays or, if it is quantized or its values are in host memory, a copy
        of the rows' pages in the model's dtype, as large as one layer's share of the pool.
        """
        if not self.is_quantized and host is None:
            return self.k_pages, self.v_pages, page_table
        page = page_table.reshape(-1)
        if host is None:
            values = self.v_pages.at[page].get(mode="clip")
        else:
            values = host.fetch_pages(page, self.page_size)
        values = self._loaded(values, self.v_scales, page, dtype)
        table = jnp.arange(page.size, dtype=page_table.dtype).reshape(page_table.shape)
        return self.keys(page, dtype), values, table

    def _loaded(
        self, stored: Array, scales: Array | None, at: Any, dtype: Any
    ) -> Float[Array, "*shape D"]:
        """Returns the dequantized numbers; their scales are `scales[at]`."""
        if scales is None:
            return stored
        return dequantize(stored, scales.at[at].get(mode="clip"), dtype)


@no_type_check  # jax also builds it from shapes and partitions
@struct.dataclass
class LaneAdapters:
    """The adapter of each sequence, for a model with several (`dms_jax.model.adapters`).

    Attributes:
      slots: index of the adapter.
      scales: factors of all columns of low-rank updates, 0 for other adapters' columns; None
        without low-rank updates.
    """

    slots: Int[Array, " B"] = struct.field(metadata=axes("sequences"))
    scales: Float[Array, "B R"] | None = struct.field(metadata=axes("sequences"))


@no_type_check  # jax also builds it from shapes and partitions
@struct.dataclass
class Cache:
    """Everything that generation carries from step to step.

    Attributes:
      pool: keys and values.
      page_table: the pages of each row; N (no page) beyond the reserved ones.
      lengths: slots in use per row.
      seen: tokens that each sequence has seen; also the position of its next token.
      max_lengths: the most tokens of each sequence (prompt and longest answer), for policies whose
        budget is a share of that.
      adapters: the adapter of each sequence; None if all use the model's.
      row_state: the policy's state per row, leaves [L, B, K, ...]; the axes after L are those of
        `PolicyState.rows`.
      page_state: the policy's state per page, leaves [N, ...], as in `PolicyState.pages`.
    """

    pool: Pool
    page_table: Int[Array, "L B K M"] = struct.field(
        metadata=axes("layers", "sequences", "kv_heads")
    )
    lengths: Int[Array, "L B K"] = struct.field(metadata=axes("layers", "sequences", "kv_heads"))
    seen: Int[Array, " B"] = struct.field(metadata=axes("sequences"))
    max_lengths: Int[Array, " B"] = struct.field(metadata=axes("sequences"))
    adapters: LaneAdapters | None = None
    row_state: Any = ()
    page_state: Any = ()

    @property
    def k_pages(self) -> Shaped[Array, "N P D"]:
        """The keys of the pool, by page."""
        return self.pool.k_pages

    @property
    def v_pages(self) -> Shaped[Array, "NV P D"]:
        """The values of the pool, by page."""
        return self.pool.v_pages

    @property
    def page_size(self) -> int:
        """P, the number of slots per page."""
        return self.pool.page_size


def store(
    pages: Shaped[Array, "N P *tail"],
    page_table: Int[Array, "B K M"],
    slots: Int[Array, "B K T"],
    values: Shaped[Array, "B T K *tail"],
) -> Shaped[Array, "N P *tail"]:
    """Returns the pages with `values` written into the rows' slots.

    Negative slots, and slots beyond the row's reserved pages, are skipped: the host reserves before
    a program runs and checks the lengths after it. No two tokens of a row may have the same slot.
    """
    num_pages, page_size = pages.shape[:2]
    page = _page_of(page_table, slots, num_pages, page_size)
    new = jnp.swapaxes(values, 1, 2).astype(pages.dtype)
    # Otherwise XLA fuses them into the scatter, and recomputes them for every number of a vector.
    page, offset, new = jax.lax.optimization_barrier((page, slots % page_size, new))
    return pages.at[page, offset].set(new, mode="drop", unique_indices=True)


def _page_of(
    page_table: Int[Array, "B K M"], slots: Int[Array, "B K T"], num_pages: int, page_size: int
) -> Int[Array, "B K T"]:
    """Returns the page of each slot; N (no page) for slots that are negative or not reserved."""
    page = jnp.take_along_axis(
        page_table, jnp.maximum(slots, 0) // page_size, axis=-1, mode="fill", fill_value=num_pages
    )
    return jnp.where(slots < 0, num_pages, page)


def load(
    pages: Shaped[Array, "N P *rest"], page_table: Int[Array, "B K M"], lengths: Int[Array, "B K"]
) -> Shaped[Array, "B K S *rest"]:
    """Returns all S = M * P slots of the rows, with zeros beyond a row's length."""
    rest = pages.shape[2:]
    rows = pages.at[page_table].get(mode="fill", fill_value=0)
    rows = rows.reshape(*page_table.shape[:2], -1, *rest)
    live = jnp.arange(rows.shape[2]) < lengths[..., None]
    return jnp.where(live.reshape(*live.shape, *[1] * len(rest)), rows, 0)


def compact(
    pools: Any,
    page_table: Int[Array, "B K M"],
    keep: Bool[Array, "B K S"],
) -> tuple[Any, Int[Array, "B K"]]:
    """Moves the kept slots of every row to its front, in order, after an eviction.

    Works in place, a few pages of every row per iteration: an iteration reads before it writes, and
    a kept slot never moves to a higher one, so no later iteration reads overwritten slots. A GPU
    waits for the host before each iteration of a loop, so rows of few pages are moved at once,
    without a loop.

    Args:
      pools: arrays [N, P, ...] addressed by page.
      page_table: the pages of the rows.
      keep: retention mask: True for slots to keep; False beyond the rows' lengths.

    Returns:
      The arrays, and the slots in use per row.
    """
    lengths = keep.sum(-1, dtype=jnp.int32)
    page_size = keep.shape[-1] // page_table.shape[-1]
    numbers = max(math.prod(pool.shape[1:]) for pool in jax.tree.leaves(pools))
    most = NUMBERS_MOVED // (numbers * math.prod(keep.shape[:-1]))
    block = min(keep.shape[-1], max(1, min(PAGES_MOVED, most)) * page_size)
    turns = -(-keep.shape[-1] // block)
    order = marked_first(keep)
    order = jnp.pad(order, [(0, 0)] * 2 + [(0, turns * block - keep.shape[-1])])

    def move_some(turn, pools):
        first = turn * block
        source = jax.lax.dynamic_slice_in_dim(order, first, block, axis=-1)
        target = jnp.broadcast_to(first + jnp.arange(block, dtype=jnp.int32), source.shape)
        from_page = jnp.take_along_axis(page_table, source // page_size, axis=-1)
        to_page = jnp.take_along_axis(page_table, target // page_size, axis=-1)

        def move(pool):
            moved = pool.at[from_page, source % page_size].get(mode="clip")
            # A page number out of range is dropped.
            to = jnp.where(target < lengths[..., None], to_page, pool.shape[0])
            return pool.at[to, target % page_size].set(moved, mode="drop", unique_indices=True)

        return jax.tree.map(move, pools)

    if turns == 1:
        return move_some(0, pools), lengths
    needed = -(-lengths.max(initial=0) // block)
    return jax.lax.fori_loop(0, needed, move_some, pools), lengths
