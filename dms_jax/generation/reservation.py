"""Reserves pages for the rows of a cache before programs run, and releases the unused ones.

The lengths of rows are exact as of the last collected program. In prompts and steps in flight each
token counts as a slot, so the reservation suffices whatever they evict; when a program is
collected, `trim` releases the difference. Under a policy that evicts in place (DMS) no eviction
frees a page: the dead slot is overwritten, the row grows less than was reserved, and `trim` returns
its last pages.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np
from jaxtyping import Array, Bool, Int

from dms_jax.cache import PageAllocator
from dms_jax.cache.pages import few_sizes, few_widths
from dms_jax.policies import Policy


@dataclasses.dataclass(frozen=True)
class _Prompts:
    """The last prefill program, until the lengths after it are collected; see `add_prompts`."""

    lengths: Array
    frozen: Array | None
    counts: Int[np.ndarray, " B"]
    ends: Bool[np.ndarray, " B"]


class Reservation:
    """The pages of rows: those held, and those that the next program may need.

    Args:
      policy: the policy, which bounds the slots of a row.
      allocator: the pages.
      page_size: slots of a page (P).
      windows: Int[L], the sliding window of each layer; 0 for layers that the policy manages.
      max_tokens: the longest sequence that page tables are sized for.
      table_width: pages per row in page tables, at least; None lets them grow.
      layer_bytes: bytes of a page of each layer.
      state_bytes: bytes of a sequence's policy state.
      page_bytes: bytes of a page, the part in host memory included.

    Attributes:
      shrinks: whether the policy cuts rows (`Policy.shrinks`).
      steps_in_flight: Int[B], the most tokens of each lane in chunks of steps that are in flight.
      epochs: Int[B], how often each lane was released: results of programs launched in an earlier
        epoch of a lane do not belong to its present request.
    """

    def __init__(
        self,
        policy: Policy,
        allocator: PageAllocator,
        *,
        page_size: int,
        windows: Int[np.ndarray, " L"],
        max_tokens: int,
        table_width: int | None,
        layer_bytes: Int[np.ndarray, " L"],
        state_bytes: int,
        page_bytes: int,
    ):
        self.policy, self.page_size, self.max_tokens = policy, page_size, max_tokens
        self.shrinks = policy.shrinks
        self._table_width, self._expected_slots = table_width, 1
        self._layer_bytes, self._state_bytes = layer_bytes, state_bytes
        self._page_bytes = page_bytes
        self._max_length = 0  # tokens of the longest sequence so far
        self._windows = windows if windows.any() else None
        self._slot_limit: int | None = None
        self.allow_length(1)
        self.reset(allocator)

    def reset(self, allocator: PageAllocator) -> None:
        """Starts anew with empty rows over the pages of an allocator."""
        self.allocator = allocator
        self._lengths = np.zeros(allocator.reserved.shape, np.int64)
        self._frozen = np.zeros_like(self._lengths)
        num_lanes = self._lengths.shape[1]
        self._prompts: _Prompts | None = None  # not collected yet
        self.steps_in_flight = np.zeros(num_lanes, np.int64)
        self.epochs = np.zeros(num_lanes, np.int64)

    # -- lengths ----------------------------------------------------------------------------------

    @property
    def lengths(self) -> Int[np.ndarray, "L B K"]:
        """The slots in use per row after all prompts (waits for them) and collected steps."""
        self.collect_prompts()
        return self._lengths

    def lengths_of(self, lane: int) -> Int[np.ndarray, "L K"]:
        """Returns the slots in use per row of a lane; waits only for the lane's prompt."""
        if self._prompts is not None and self._prompts.counts[lane]:
            self.collect_prompts()
        return self._lengths[:, lane]

    def frozen_of(self, lane: int) -> Int[np.ndarray, "L K"]:
        """Returns the leading slots of each row that no later token overwrites, or fewer."""
        lengths = self.lengths_of(lane)
        appends = self.policy.appends and self._windows is None
        return lengths if appends else self._frozen[:, lane]

    def add_uniform(self, counts: Int[np.ndarray, " B"]) -> None:
        """Counts tokens that a program adds to every row of their lanes without evicting any."""
        self._lengths = self.lengths + counts[:, None]

    def add_prompts(
        self,
        lengths: Array,
        frozen: Array | None,
        counts: Int[np.ndarray, " B"],
        ends: Bool[np.ndarray, " B"],
        *,
        prompt: bool,
    ) -> None:
        """Counts the tokens of a prefill program that was launched.

        Args:
          lengths: Int[L, B, K] on the device, the slots in use of each row after it.
          frozen: Int[L, B, K] on the device, those that are never written again, if known.
          counts: number of its tokens per lane.
          ends: whether they complete the prompt of the lane.
          prompt: whether its tokens belong to prompts.
        """
        self.collect_prompts()  # those before it, while it runs
        self.allocator.trim(self.slots_after(counts, prompt=prompt))
        self._prompts = _Prompts(lengths, frozen, counts, ends)

    def add_steps(self, most: Int[np.ndarray, " B"]) -> None:
        """Counts the steps of a program that was launched, at most `most` of each lane."""
        self.steps_in_flight = self.steps_in_flight + most

    def collect_prompts(self) -> None:
        """Waits for the last prompts, and stores the lengths after them."""
        if self._prompts is not None:
            prompts, self._prompts = self._prompts, None
            frozen = None if prompts.frozen is None else np.asarray(prompts.frozen)
            self._set_lengths(np.asarray(prompts.lengths), frozen, prompts.counts > 0)

    def collect_steps(
        self,
        lengths: Int[np.ndarray, "L B K"],
        frozen: Int[np.ndarray, "L B K"] | None,
        *,
        ran: Bool[np.ndarray, " B"],
        most: Int[np.ndarray, " B"],
        ended: Bool[np.ndarray, " B"],
        current: Bool[np.ndarray, " B"],
    ) -> None:
        """Stores the lengths after the oldest program of steps.

        Args:
          lengths: the slots in use of each row after it.
          frozen: those that are never written again, if known.
          ran: lanes that took a step in it.
          most: the steps that each lane could take in it.
          ended: lanes whose answer ended in it; they are idle in programs launched since.
          current: lanes that were not released since it was launched.
        """
        left = np.where(ended, 0, self.steps_in_flight - most)
        self.steps_in_flight = np.where(current, left, self.steps_in_flight)
        self._set_lengths(lengths, frozen, ran)

    def _set_lengths(
        self,
        lengths: Int[np.ndarray, "L B K"],
        frozen: Int[np.ndarray, "L B K"] | None,
        lanes: Bool[np.ndarray, " B"],
    ) -> None:
        """Updates the lengths of `lanes` from a finished program.

        Other lanes are left alone: they may have been reused since the launch.
        """
        # In these lanes only: after a cut in flight, pages are freed before the host knows the new
        # lengths.
        held = self.allocator.reserved * self.page_size
        assert (lengths <= held)[:, lanes].all(), "a row outgrew its reserve"
        self._lengths = np.where(lanes[:, None], lengths, self._lengths).astype(np.int64)
        if frozen is not None:
            known = np.maximum(self._frozen, frozen)
            self._frozen = np.where(lanes[:, None], known, self._frozen)

    def copy(self, source_of: Mapping[int, int]) -> None:
        """Sets the lengths of lanes to those of the lanes whose sequences they copy."""
        targets, sources = list(source_of), list(source_of.values())
        for each in (self.lengths, self._frozen):
            each[:, targets] = each[:, sources]

    def set_lengths_of(
        self, lane: int, lengths: Int[np.ndarray, "L K"], frozen: Int[np.ndarray, "L K"]
    ) -> None:
        """Sets the slots in use, and those that are frozen, of a lane with no program in flight."""
        self._lengths[:, lane], self._frozen[:, lane] = lengths, frozen

    def release_lanes(self, lanes: list[int]) -> None:
        """Empties lanes and frees their pages, even if programs are in flight for them."""
        self._lengths[:, lanes] = self._frozen[:, lanes] = 0
        self.steps_in_flight[lanes] = 0
        self.epochs = self.epochs.copy()  # programs in flight have the old array
        self.epochs[lanes] += 1
        if self._prompts is not None:
            counts = self._prompts.counts.copy()
            counts[lanes] = 0
            self._prompts = dataclasses.replace(self._prompts, counts=counts)
        self.allocator.release(np.asarray(lanes, np.int64))

    # -- slots and pages --------------------------------------------------------------------------

    def allow_length(self, tokens: int) -> None:
        """Allows sequences of `tokens` tokens; call it before pages are reserved for them."""
        if tokens > self._max_length:
            self._max_length = tokens
            self._slot_limit = self.policy.footprint(tokens, page_size=self.page_size).at_most
            if self._windows is not None and self._windows.all():
                self._slot_limit = int(self._windows.max())

    def _in_windows(
        self, slots: Int[np.ndarray, "L *B K"], others: Int[np.ndarray, "L *B K"]
    ) -> Int[np.ndarray, "L *B K"]:
        """Limits `slots` to the window in layers that have one; returns `others` elsewhere."""
        if self._windows is None:
            return others
        windows = self._windows.reshape(-1, *[1] * (slots.ndim - 1))
        return np.where(windows > 0, np.minimum(slots, windows), others)

    @property
    def _longest_row(self) -> int | None:
        """The most slots of a row after any cut of its prompt; None without a limit."""
        if self._slot_limit is None or self._windows is None:
            return self._slot_limit
        return max(self._slot_limit, int(self._windows.max()))

    def slots_held(self) -> Int[np.ndarray, "L B K"]:
        """Returns the most slots that each row can have in use after the programs in flight."""
        slots, prompts = self._lengths, self._prompts
        if prompts is not None:
            slots = slots + prompts.counts[:, None]
            if not self.shrinks:
                slots = self.limited(slots, self._lengths)
            else:
                slots = self._in_windows(slots, slots)
                if self._slot_limit is not None:  # rows are cut where their prompt ends
                    cut = self.limited(slots, np.zeros_like(slots))
                    slots = np.where(prompts.ends[:, None], cut, slots)
        return self.limited(slots + self.steps_in_flight[:, None], slots)

    def slots_after(
        self, extra: Int[np.ndarray, "*rows"], *, prompt: bool = False
    ) -> Int[np.ndarray, "L B K"]:
        """Returns the most slots that each row can need after `extra` tokens per lane, or per row.

        With `prompt` some tokens belong to prompts, which are held in full until they are cut.
        """
        extra, held = np.asarray(extra), self.slots_held()
        slots = held + (extra[:, None] if extra.ndim == 1 else extra)
        whole = prompt and self.shrinks
        return self._in_windows(slots, slots) if whole else self.limited(slots, held)

    def limited(
        self, slots: Int[np.ndarray, "L *B K"], held: Int[np.ndarray, "L *B K"]
    ) -> Int[np.ndarray, "L *B K"]:
        """Limits `slots` to the most that decoding rows can need if they hold `held` now."""
        limit = self._slot_limit
        most = slots if limit is None else np.minimum(slots, np.maximum(limit, held))
        return self._in_windows(slots, most)

    def fits(self, extra: Int[np.ndarray, "*rows"], *, prompt: bool = False) -> bool:
        """Returns whether the pool can hold `extra` more tokens per lane, or per row.

        Waits for prompts if that depends on what they evict.
        """
        self._collect_if_needed(extra, prompt=prompt)
        return self.allocator.fits(self.slots_after(extra, prompt=prompt))

    def reserve(self, extra: Int[np.ndarray, "*rows"], *, prompt: bool = False) -> None:
        """Reserves pages for `extra` more tokens per lane, or per row, or raises CapacityError."""
        self._collect_if_needed(extra, prompt=prompt)
        self.allocator.reserve(self.slots_after(extra, prompt=prompt))

    def trim(self) -> None:
        """Releases every page that no row needs, now or after the programs in flight.

        It does not wait: pages that prompts in flight may need stay reserved.
        """
        self.allocator.trim(self.slots_held())

    def _collect_if_needed(self, extra: Int[np.ndarray, "*rows"], *, prompt: bool) -> None:
        """Collects prompts unless `extra` more tokens can be launched with any evictions in them.

        Lengths must be exact if the pool is almost full, or if their upper bound would need a wider
        page table, and so another compiled program.
        """
        if self._prompts is None:
            return
        slots = self.slots_after(extra, prompt=prompt)
        known, most = (int(each.max(initial=1)) for each in (self._lengths, slots))
        if self.table_width(most) > self.table_width(known) or not self.allocator.fits(slots):
            self.collect_prompts()
            self.trim()

    def cache_bytes(self) -> list[int]:
        """Returns the device bytes of each lane's reserved pages and of its policy state."""
        pages = np.einsum("L,LBK->B", self._layer_bytes, self.allocator.reserved)
        return (pages + self._state_bytes).tolist()

    def bytes_of(self, slots: Int[np.ndarray, "L K"]) -> dict[str, int]:
        """Returns the `cache_bytes` and `host_bytes` (see `Usage`) of a sequence.

        Args:
          slots: the slots in use of each row. Pages reserved beyond them do not count: steps may be
            in flight in which the lane is idle.
        """
        pages = self.allocator.pages_for(slots).sum(1)
        held = int(self._layer_bytes @ pages)
        on_host = int(self._page_bytes * pages.sum()) - held
        return {"cache_bytes": held + self._state_bytes, "host_bytes": on_host}

    # -- page tables ------------------------------------------------------------------------------

    def expect(self, tokens: int) -> None:
        """Makes page tables wide enough for a sequence of `tokens` tokens from the start.

        Each width is a program to compile. With this the first programs of long prompts, and the
        first steps, have the same width as the last ones.
        """
        limit = None if self.shrinks else self._longest_row
        slots = tokens if limit is None else min(tokens, limit)
        self._expected_slots = max(self._expected_slots, slots)

    def fits_table(self, extra: Int[np.ndarray, " B"]) -> bool:
        """Whether steps keep the width of their page table with `extra` more tokens."""
        lanes = self._in_table(extra > 0)
        pages = self.allocator.reserved[:, lanes].max(initial=1)
        after = self.slots_after(extra)[:, lanes].max(initial=1)
        widths = [int(pages) * self.page_size, int(after)]
        now, then = (self.table_width(each, steps=True) for each in widths)
        return then <= now

    def table_width(self, slots: int, *, steps: bool = False) -> int:
        """Returns the pages of a row in the compiled page table if the longest row has `slots`.

        Steps run after their prompts are cut, so they need a narrower table, which makes temporary
        arrays with a number per slot of the table (scores, rows to be cut) smaller.
        """
        expected = self._expected_slots
        if steps and self._longest_row is not None:
            expected = min(expected, self._longest_row)
        widest = -(-max(slots, expected) // self.page_size)
        if self._table_width is not None:
            return max(self._table_width, widest)
        limit = None if self.shrinks else self._longest_row
        most = self.max_tokens if limit is None else min(limit, self.max_tokens)
        return few_widths(widest, few_sizes(-(-most // self.page_size)))

    def table_widths(self, *, steps: bool = False) -> list[int]:
        """Returns every `table_width` of sequences up to `max_tokens`."""
        if self._table_width is not None:
            return [self.table_width(1, steps=steps)]
        cut = self._longest_row if steps or not self.shrinks else None
        most = self.max_tokens if cut is None else min(cut, self.max_tokens)
        slots = (*range(1, most, self.page_size), most)
        return sorted({self.table_width(each, steps=steps) for each in slots})

    def _in_table(self, stepping: Bool[np.ndarray, " B"]) -> Bool[np.ndarray, " B"]:
        """Returns the lanes whose rows must fit into the page table of steps.

        Prompts that will be cut may hold more pages than any row of a step.
        """
        return stepping if self.shrinks else np.ones_like(stepping)

    def table(
        self, *, stepping: Bool[np.ndarray, " B"] | None = None
    ) -> Int[np.ndarray, "L B K M"]:
        """Returns the page table for the next program; see `table_width`.

        Args:
          stepping: lanes that take steps in it; None for a program of prompts.
        """
        lanes = None if stepping is None else self._in_table(stepping)
        held = self.allocator.reserved if lanes is None else self.allocator.reserved[:, lanes]
        slots = int(held.max(initial=1)) * self.page_size
        width = self.table_width(slots, steps=stepping is not None)
        return self.allocator.table_of_width(width, lanes)
