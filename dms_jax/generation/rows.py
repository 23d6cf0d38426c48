"""The slots and pages of the rows of a cache, as the host knows them.

Lengths are exact as of the last program whose results were read. In prompts and chunks of steps
that were launched since then each token counts as a slot: what is reserved for the next program
suffices, whatever they evict. When a program is read, what it did not need is released.
"""

import abc
import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Array, Bool, Int

from dms_jax.cache import PageAllocator
from dms_jax.policies import Policy


@dataclasses.dataclass(frozen=True)
class UnreadPrompts:
    """A program of given tokens that was launched, until the lengths after it are read.

    Attributes:
      lengths: Int[L, B, K] on the device, the slots in use of each row after it.
      counts: Int[B], its tokens of each lane.
      ends: Bool[B], whether they complete the prompt of the lane.
    """

    lengths: Array
    counts: Int[np.ndarray, " B"]
    ends: Bool[np.ndarray, " B"]


class Rows(abc.ABC):
    """Reserves and releases the pages of rows.

    Attributes:
      allocator: the pages.
      unread: Int[B], the most tokens of each lane in chunks of steps that were not read.
      forgotten: Int[B], how often each lane was forgotten: steps that were launched before are not
        those of who has it now.
    """

    cache: Any
    policy: Policy
    page_size: int
    page_bytes: int
    allocator: PageAllocator
    unread: Int[np.ndarray, " B"]
    forgotten: Int[np.ndarray, " B"]
    _max_length: int  # tokens of the longest sequence so far
    _slot_limit: int | None
    _layer_bytes: Any
    _state_bytes: int
    _prompts: UnreadPrompts | None  # the last ones, if the lengths after them were not read

    @property
    def lengths(self) -> Int[np.ndarray, "L B K"]:
        """The slots in use per row after all prompts, which it waits for, and the steps read."""
        self.read_prompts()
        return self._lengths

    @lengths.setter
    def lengths(self, lengths: Int[np.ndarray, "L B K"]) -> None:
        self._lengths: Int[np.ndarray, "L B K"] = lengths

    def read_prompts(self) -> None:
        """Waits for the last prompts, and reads the lengths after them."""
        if self._prompts is not None:
            unread, self._prompts = self._prompts, None
            self.read_lengths(np.asarray(unread.lengths), unread.counts > 0)

    def read_lengths(
        self, lengths: Int[np.ndarray, "L B K"], lanes: Bool[np.ndarray, " B"]
    ) -> None:
        """Sets the lengths of some lanes to those that a program returned; it ran in no other one.

        Others may have been cleared and taken since it was launched. Waits for no other program.
        """
        lengths = np.where(lanes[:, None], lengths, self._lengths)
        held = self.allocator.reserved * self.page_size
        assert (lengths <= held).all(), "a row outgrew its reserve"
        self.lengths = lengths.astype(np.int64)

    def lengths_of(self, lane: int) -> Int[np.ndarray, "L K"]:
        """Returns the slots in use per row of a lane; waits for prompts only if one is its own."""
        if self._prompts is not None and self._prompts.counts[lane]:
            self.read_prompts()
        return self._lengths[:, lane]

    def forget(self, lanes: list[int]) -> None:
        """Sets the lengths of lanes to none, whatever was launched for them."""
        self._lengths[:, lanes] = 0
        self.unread[lanes] = 0
        self.forgotten = self.forgotten.copy()  # what was launched has the old
        self.forgotten[lanes] += 1
        if self._prompts is not None:
            counts = self._prompts.counts.copy()
            counts[lanes] = 0
            self._prompts = dataclasses.replace(self._prompts, counts=counts)

    @abc.abstractmethod
    def table_width(self, slots: int, *, steps: bool = False) -> int:
        """Returns the pages of a row in the compiled page table if the longest row has `slots`.

        `steps` is for the programs of decode steps.
        """

    def raise_max_length(self, tokens: int) -> None:
        """Raises the maximum length of sequences, before pages are reserved for them."""
        if tokens > self._max_length:
            self._max_length = tokens
            self._slot_limit = self.policy.footprint(tokens, page_size=self.page_size).at_most

    def slots_held(self) -> Int[np.ndarray, "L B K"]:
        """Returns the most slots that each row can have in use after what was launched."""
        slots, prompts = self._lengths, self._prompts
        if prompts is not None:
            slots = slots + prompts.counts[:, None]
            if not self.policy.shrinks:
                slots = self.cut(slots, self._lengths)
            elif self._slot_limit is not None:  # rows are cut where their prompt ends
                cut = np.minimum(slots, self._slot_limit)
                slots = np.where(prompts.ends[:, None], cut, slots)
        return self.cut(slots + self.unread[:, None], slots)

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
        """Returns whether the pool can hold `extra` more tokens per lane, or per row.

        Waits for prompts if that depends on what they evict.
        """
        self._read_if_needed(extra, prompt=prompt)
        return self.allocator.fits(self.slots_after(extra, prompt=prompt))

    def fits_table(self, extra: Int[np.ndarray, " B"]) -> bool:
        """Returns whether steps keep their page table as it is with `extra` more tokens."""
        pages = self.allocator.reserved.max(initial=1)
        widths = [int(pages) * self.page_size, int(self.slots_after(extra).max(initial=1))]
        now, then = (self.table_width(each, steps=True) for each in widths)
        return then <= now

    def reserve(self, extra: Int[np.ndarray, "*rows"], *, prompt: bool = False) -> None:
        """Reserves pages for `extra` more tokens per lane, or per row, or raises CapacityError."""
        self._read_if_needed(extra, prompt=prompt)
        self.allocator.reserve(self.slots_after(extra, prompt=prompt))

    def trim(self) -> None:
        """Releases every page that no slot in use needs, now or after what was launched.

        It waits for nothing: what prompts can need that were not read stays reserved.
        """
        self.allocator.trim(self.slots_held())

    def _read_if_needed(self, extra: Int[np.ndarray, "*rows"], *, prompt: bool) -> None:
        """Reads prompts unless `extra` more tokens can be launched whatever these evict.

        They cannot if the pool is so full that lengths must be exact, or if rows that evict nothing
        would need a wider table than the lengths that are known: its program is compiled anew.
        """
        if self._prompts is None:
            return
        slots = self.slots_after(extra, prompt=prompt)
        known, most = (int(each.max(initial=1)) for each in (self._lengths, slots))
        if self.table_width(most) > self.table_width(known) or not self.allocator.fits(slots):
            self.read_prompts()
            self.trim()

    def cache_bytes(self) -> list[int]:
        """Returns the device bytes of each lane's reserved pages and of its policy state."""
        pages = np.einsum("L,LBK->B", self._layer_bytes, self.allocator.reserved)
        return (pages + self._state_bytes).tolist()

    def bytes_of(self, slots: Int[np.ndarray, "L K"]) -> dict[str, int]:
        """Returns the `cache_bytes` and `host_bytes` (see `Usage`) of a sequence.

        Args:
          slots: the slots in use of each row. What is reserved beyond them does not count: steps
            may run in which its lane is idle.
        """
        pages = self.allocator.pages_for(slots).sum(1)
        held = int(self._layer_bytes @ pages)
        on_host = int(self.page_bytes * pages.sum()) - held
        return {"cache_bytes": held + self._state_bytes, "host_bytes": on_host}
