"""The slots and pages of the rows of a cache, as the host knows them.

Lengths are exact as of the last program whose results were read. In chunks of steps that were
launched since then each token counts as a slot: what is reserved for the next chunk suffices,
whatever they evict. When a chunk is read, what it did not need is released.
"""

import abc
from typing import Any

import numpy as np
from jaxtyping import Int

from dms_jax.cache import PageAllocator
from dms_jax.policies import Policy


class Rows(abc.ABC):
    """Reserves and releases the pages of rows.

    Attributes:
      allocator: the pages.
      unread: Int[B], the most tokens of each lane in chunks of steps that were not read.
    """

    cache: Any
    policy: Policy
    page_size: int
    page_bytes: int
    allocator: PageAllocator
    unread: Int[np.ndarray, " B"]
    _max_length: int  # tokens of the longest sequence so far
    _slot_limit: int | None
    _layer_bytes: Any
    _state_bytes: int

    @property
    def lengths(self) -> Int[np.ndarray, "L B K"]:
        """The slots in use per row after the last program that was read.

        Waits for prompts if they depend on them.
        """
        if self._lengths is None:
            self.read_lengths(np.asarray(self.cache.lengths))
        assert self._lengths is not None
        return self._lengths

    @lengths.setter
    def lengths(self, lengths: Int[np.ndarray, "L B K"]) -> None:
        self._lengths: Int[np.ndarray, "L B K"] | None = lengths

    def read_lengths(self, lengths: Int[np.ndarray, "L B K"]) -> None:
        """Sets the lengths to those that a program returned."""
        held = self.allocator.reserved * self.page_size
        assert (lengths <= held).all(), "a row outgrew its reserve"
        self.lengths = lengths.astype(np.int64)

    @abc.abstractmethod
    def table_width(self, slots: int) -> int:
        """Returns the pages of a row in the compiled page table if the longest row has `slots`."""

    def raise_max_length(self, tokens: int) -> None:
        """Raises the maximum length of sequences, before pages are reserved for them."""
        if tokens > self._max_length:
            self._max_length = tokens
            self._slot_limit = self.policy.footprint(tokens, page_size=self.page_size).at_most

    def slots_held(self) -> Int[np.ndarray, "L B K"]:
        """Returns the most slots that each row can have in use after what was launched."""
        return self.cut(self.lengths + self.unread[:, None], self.lengths)

    def slots_after(
        self, extra: Int[np.ndarray, "*rows"], *, prompt: bool = False
    ) -> Int[np.ndarray, "L B K"]:
        """Returns the most slots that each row can need after `extra` tokens per lane, or per row.

        `prompt` means that some of the tokens belong to prompts, which a policy that cuts rows
        afterwards holds in full.
        """
        extra, held = np.asarray(extra), self.slots_held()
        slots = held + (extra[:, None] if extra.ndim == 1 else extra)
        return slots if prompt and self.policy.shrinks else self.cut(slots, held)

    def cut(
        self, slots: Int[np.ndarray, "*rows"], held: Int[np.ndarray, "*rows"]
    ) -> Int[np.ndarray, "*rows"]:
        """Returns the most of `slots` that rows can need which hold `held` and decode."""
        limit = self._slot_limit
        return slots if limit is None else np.minimum(slots, np.maximum(limit, held))

    def fits(self, extra: Int[np.ndarray, "*rows"], *, prompt: bool = False) -> bool:
        """Returns whether the pool can hold `extra` more tokens per lane, or per row."""
        return self.allocator.fits(self.slots_after(extra, prompt=prompt))

    def fits_table(self, extra: Int[np.ndarray, " B"]) -> bool:
        """Returns whether the page table stays as wide as it is with `extra` more tokens."""
        pages = self.allocator.reserved.max(initial=1)
        widths = [int(pages) * self.page_size, int(self.slots_after(extra).max(initial=1))]
        now, then = map(self.table_width, widths)
        return then <= now

    def reserve(self, extra: Int[np.ndarray, "*rows"], *, prompt: bool = False) -> None:
        """Reserves pages for `extra` more tokens per lane, or per row, or raises CapacityError."""
        self.allocator.reserve(self.slots_after(extra, prompt=prompt))

    def trim(self) -> None:
        """Releases every page that no slot in use needs, now or after what was launched."""
        self.allocator.trim(self.slots_held())

    def cache_bytes(self) -> list[int]:
        """Returns the device bytes of each lane's reserved pages and of its policy state."""
        pages = self.allocator.reserved.sum(2, dtype=np.int64)
        return (self._layer_bytes @ pages + self._state_bytes).tolist()

    def host_bytes(self) -> list[int]:
        """Returns the bytes of the values in host memory of each lane's reserved pages."""
        pages = self.allocator.reserved.sum(2, dtype=np.int64)
        return ((self.page_bytes - self._layer_bytes) @ pages).tolist()
