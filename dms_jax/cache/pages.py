"""The page allocator: reserves pages for rows and frees them, on the host.

Pages are reserved before a compiled chunk runs and never allocated inside it. The allocator keeps
the page table as a NumPy array and one free list per shard of the pool; a call costs a few NumPy
operations, independent of the number of tokens.

An eviction does not free a page. The host reserves for the worst case, in which a chunk evicts
nothing, and `trim` frees the difference once the lengths are known: under DMS, which reuses dead
slots in place, and after a cut, which moves the kept tokens to the row's first pages.

A page may belong to several rows, and to cached prefixes (`generation.prefixes`), if nothing writes
to it any more. Pages held only by prefixes count as free: reserving reclaims them.
"""

import functools
from collections.abc import Callable, Mapping

import numpy as np
from jaxtyping import Bool, Int

from dms_jax.errors import CapacityError

_CELL_NUMBERS = 3  # per changed cell: row, column, page


class PageAllocator:
    """Allocates the pages of a pool to rows.

    Attributes:
      table: Int32[L, B, K, M], the pages of each row; `no_page` in unreserved cells. Page numbers
        are local to the row's shard.
      reserved: Int32[L, B, K], pages reserved for each row.

      reclaim: called with (index of a free list, missing pages) before rows take pages of prefixes;
        drops prefixes until enough are free.
      on_free: called with freed pages that nothing holds any more.

    With `first` = (layers, pages), pages 0 ... pages - 1 of each shard are only for the rows of the
    first `layers` layers, and the other pages for the rows of the other layers.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_sequences: int,
        num_kv_heads: int,
        pages_per_shard: int,
        page_size: int,
        sequence_shards: int = 1,
        head_shards: int = 1,
        first: tuple[int, int] = (0, 0),
    ):
        self.page_size = page_size
        self.pages_per_shard = pages_per_shard
        self.no_page = pages_per_shard
        rows = (num_layers, num_sequences, num_kv_heads)
        self.reserved = np.zeros(rows, np.int32)
        self.table = np.full((*rows, 1), self.no_page, np.int32)
        self._changes: list[tuple[np.ndarray, np.ndarray]] | None = []  # None: too many
        self._num_changes = 0
        first_layers, first_pages = first
        shards = sequence_shards * head_shards
        self._shards = shards
        self._lanes_per_shard = num_sequences // sequence_shards
        self._ranges = [(first_pages, pages_per_shard)] + [(0, first_pages)] * bool(first_layers)
        self._free = [
            np.arange(start, end, dtype=np.int32)[::-1]
            for start, end in self._ranges
            for _ in range(shards)
        ]
        # By shard and page: the number of rows, and of prefixes, that hold it.
        self._rows = np.zeros((shards, pages_per_shard), np.int32)
        self._prefixes = np.zeros((shards, pages_per_shard), np.int32)
        self.reclaim: Callable[[int, int], None] | None = None
        self.on_free: Callable[[Int[np.ndarray, " n"]], None] | None = None
        sequence = np.arange(num_sequences) * sequence_shards // num_sequences
        head = np.arange(num_kv_heads) * head_shards // num_kv_heads
        group = (np.arange(num_layers) < first_layers)[:, None, None]
        self._shard = np.broadcast_to(sequence[:, None] * head_shards + head + shards * group, rows)

    @property
    def pages_in_use(self) -> int:
        """Pages of all shards that rows hold."""
        return int(np.count_nonzero(self._rows))

    @property
    def free_pages(self) -> int:
        """Frees pages of the fullest shard."""
        return min(len(free) for free in self._free)

    def pages_for(self, slots: Int[np.ndarray, "..."]) -> Int[np.ndarray, "..."]:
        """Returns the number of pages for `slots` slots, ceil(slots / P)."""
        return -(-np.asarray(slots) // self.page_size)

    def fits(self, slots: Int[np.ndarray, "L B K"]) -> bool:
        """Whether there are enough free pages for every row to hold `slots` slots."""
        return self._are_free(np.maximum(self.pages_for(slots) - self.reserved, 0))

    def _are_free(self, missing: Int[np.ndarray, "L B K"]) -> bool:
        """Whether there are enough free pages, counting pages held only by prefixes."""
        if missing.sum() <= self.free_pages:  # enough even if one shard needs all
            return True
        wanted = np.bincount(
            self._shard.ravel(), weights=missing.ravel(), minlength=len(self._free)
        )
        return all(
            need <= len(free) or need <= len(free) + self._reclaimable(number)
            for number, (need, free) in enumerate(zip(wanted, self._free, strict=True))
        )

    def reserve(self, slots: Int[np.ndarray, "L B K"]) -> None:
        """Reserves pages up to ceil(slots / P) for every row; rows with more keep them.

        Raises:
          CapacityError: a shard has too few free pages; then nothing is reserved.
        """
        target = np.maximum(self.pages_for(slots), self.reserved).astype(np.int32)
        if not self._are_free(target - self.reserved):
            raise CapacityError(
                f"The pool has {self.free_pages} free pages of {self.page_size} tokens, too few "
                f"for the next chunk. Give it more memory or run fewer or shorter sequences."
            )
        self._widen(int(target.max(initial=1)))
        rows, columns = _cells(self.reserved, target)
        table = self.table.reshape(-1, self.table.shape[-1])
        for shard in range(len(self._free)):
            own = self._shard.ravel()[rows] == shard
            count = int(own.sum())
            if count:
                pages = self._pop(shard, count)
                table[rows[own], columns[own]] = pages
                self._rows[shard % self._shards, pages] = 1
        self._note_changes(rows, columns)
        self.reserved = target

    def _pop(self, number: int, count: int) -> Int[np.ndarray, " n"]:
        """Takes pages from a free list, reclaiming pages of prefixes if it is short."""
        if count > len(self._free[number]):
            assert self.reclaim is not None
            self.reclaim(number, count - len(self._free[number]))
        free = self._free[number]
        self._free[number], pages = np.split(free, [len(free) - count])
        return pages

    def trim(self, slots: Int[np.ndarray, "L B K"]) -> None:
        """Frees the pages of each row beyond ceil(slots / P)."""
        self._keep(np.minimum(self.pages_for(slots), self.reserved).astype(np.int32))

    def release(self, sequences: Int[np.ndarray, " n"]) -> None:
        """Frees every page of these sequences."""
        target = self.reserved.copy()
        target[:, sequences] = 0
        self._keep(target)

    def _keep(self, target: Int[np.ndarray, "L B K"]) -> None:
        """Frees the pages of each row beyond its first `target` (at most its pages)."""
        rows, columns = _cells(target, self.reserved)
        table = self.table.reshape(-1, self.table.shape[-1])
        for shard in range(len(self._free)):
            own = self._shard.ravel()[rows] == shard
            if own.any():
                self._give_back(shard, table[rows[own], columns[own]], self._rows)
        table[rows, columns] = self.no_page
        self._note_changes(rows, columns)
        self.reserved = target

    def _give_back(
        self, number: int, pages: Int[np.ndarray, " n"], uses: Int[np.ndarray, "shards N"]
    ) -> None:
        """Ends holds on pages of a free list (`uses`), and frees pages that nothing else holds.

        # _rows: [2, 1, 1]  _prefixes: [0, 0, 1]  pages: [0, 0, 1, 2]  freed: [0, 1]
        """
        shard = number % self._shards
        several = uses[shard, pages] > 1
        uses[shard, pages[~several]] = 0  # each appears once
        np.subtract.at(uses[shard], pages[several], 1)
        freed = pages[(self._rows[shard, pages] == 0) & (self._prefixes[shard, pages] == 0)]
        if several.any():  # two rows may give back the same page
            freed = freed[np.sort(np.unique(freed, return_index=True)[1])]
        self._free[number] = np.concatenate([self._free[number], freed])
        if self.on_free is not None and len(freed):
            self.on_free(freed)

    # -- prefixes, in a pool of one shard ---------------------------------------------------------

    def _reclaimable(self, number: int) -> int:
        """Number of pages of a free list's range that are held only by prefixes."""
        return int(np.count_nonzero(self._only_prefixes(number)))

    def _only_prefixes(self, number: int) -> Bool[np.ndarray, " n"]:
        start, end = self._ranges[number // self._shards]
        shard = number % self._shards
        return (self._rows[shard, start:end] == 0) & (self._prefixes[shard, start:end] > 0)

    @property
    def pages_of_prefixes(self) -> int:
        """Pages that prefixes hold."""
        return int(np.count_nonzero(self._prefixes))

    def yields(self, pages: Int[np.ndarray, " n"]) -> Int[np.ndarray, " lists"]:
        """Returns the number of pages that each free list gains if one prefix gives up these."""
        last = (self._rows[0, pages] == 0) & (self._prefixes[0, pages] == 1)
        return np.bincount(self._lists_of(pages[last]), minlength=len(self._free))

    def _lists_of(self, pages: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
        """Returns the index of the free list of each page."""
        return (pages < self._ranges[0][0]).astype(np.int32)

    def pages_of(self, sequence: int, slots: Int[np.ndarray, "L K"]) -> Int[np.ndarray, " n"]:
        """Returns the pages of the first `slots` slots of each row of a sequence, row by row."""
        counts = self.pages_for(slots)
        columns = np.arange(counts.max(initial=0)) < counts[..., None]
        return self.table[:, sequence, :, : columns.shape[-1]][columns]

    def held_by_rows(self, pages: Int[np.ndarray, " n"]) -> Bool[np.ndarray, " n"]:
        """Returns which pages are held by rows."""
        return self._rows[0, pages] > 0

    def hold(self, pages: Int[np.ndarray, " n"]) -> None:
        """Adds a prefix's hold on pages."""
        self._prefixes[0, pages] += 1

    def drop(self, pages: Int[np.ndarray, " n"]) -> None:
        """Ends a prefix's hold on pages; frees pages that nothing else holds."""
        lists = self._lists_of(pages)
        for number in range(len(self._free)):
            self._give_back(number, pages[lists == number], self._prefixes)

    def can_take(self, counts: Int[np.ndarray, "L K"], besides: Int[np.ndarray, " _"]) -> bool:
        """Whether enough pages per row, except `besides`, are free or held only by prefixes."""
        if self.has_spare(counts):
            return True
        needs = np.bincount(self._lists_of_rows(counts), minlength=len(self._free))
        there = [len(free) + self._reclaimable(number) for number, free in enumerate(self._free)]
        idle = self._lists_of(besides[self._rows[0, besides] == 0])
        kept = np.bincount(idle, minlength=len(self._free))
        return bool((needs + kept <= there).all())

    def has_spare(
        self, counts: Int[np.ndarray, "L K"], extra: Int[np.ndarray, " n"] | None = None
    ) -> bool:
        """Whether enough pages per row are free, or yielded if prefixes drop `extra` pages."""
        needs = np.bincount(self._lists_of_rows(counts), minlength=len(self._free))
        gained = 0 if extra is None else self.yields(extra)
        return bool((needs - gained <= [len(free) for free in self._free]).all())

    def _lists_of_rows(self, counts: Int[np.ndarray, "L K"]) -> Int[np.ndarray, " n"]:
        """Returns the index of the free list of each page of the rows of a sequence."""
        return np.repeat(self._shard[:, 0].ravel(), counts.ravel())

    def take(
        self, counts: Int[np.ndarray, "L K"], besides: Int[np.ndarray, " _"]
    ) -> Int[np.ndarray, " n"] | None:
        """Takes pages for each row of a prefix, row by row; None if there are too few.

        Reclaims pages of other prefixes, as for rows of sequences, but not `besides`, which the
        prefix holds already.
        """
        if not self.can_take(counts, besides):
            return None
        pages = self._pop_for_rows(self._lists_of_rows(counts))
        self._prefixes[0, pages] = 1
        return pages

    def _pop_for_rows(self, lists: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
        """Takes a page from each of these free lists."""
        pages = np.empty(len(lists), np.int32)
        for number in range(len(self._free)):
            own = lists == number
            pages[own] = self._pop(number, int(own.sum()))
        return pages

    def give(
        self, sequence: int, counts: Int[np.ndarray, "L K"], pages: Int[np.ndarray, " n"]
    ) -> None:
        """Gives pages to the rows of an empty sequence.

        Args:
          sequence: the sequence.
          counts: number of pages of each row.
          pages: the pages, row by row: those of prefixes or other sequences, which share them, and
            `no_page` for a new one.
        """
        new, pages = pages == self.no_page, pages.copy()
        pages[new] = self._pop_for_rows(self._lists_of_rows(counts)[new])
        self._rows[0, pages] += 1
        width = int(counts.max(initial=0))
        self._widen(width)
        layers, heads, columns = np.nonzero(np.arange(width) < counts[..., None])
        self.table[layers, sequence, heads, columns] = pages
        num_sequences, num_heads = self.table.shape[1:3]
        self._note_changes((layers * num_sequences + sequence) * num_heads + heads, columns)
        self.reserved = self.reserved.copy()
        self.reserved[:, sequence] = counts

    # -- copies and tables ------------------------------------------------------------------------

    def shard_of(self, sequence: int) -> int:
        """Returns the index of the data shard that owns this sequence.

        Only sequences of one shard can copy each other's pages.
        """
        return sequence // self._lanes_per_shard

    def copies(self, source_of: Mapping[int, int]) -> list[Int[np.ndarray, "2 n"]]:
        """Returns the (source, target) pages of each shard that copy sequences to others.

        Args:
          source_of: sequence -> the sequence to copy from; both have the same number of pages
            reserved.
        """
        targets, sources = list(source_of), list(source_of.values())
        reserved = self.reserved[:, targets]
        width = int(reserved.max(initial=0))
        taken = np.arange(width) < reserved[..., None]
        pairs = np.stack([self.table[:, lanes, :, :width][taken] for lanes in (sources, targets)])
        if self._shards == 1:
            return [pairs]
        shard = np.broadcast_to(self._shard[:, targets, :, None], taken.shape)[taken] % self._shards
        return [pairs[:, shard == number] for number in range(self._shards)]

    def table_of_width(
        self, width: int, lanes: Bool[np.ndarray, " B"] | None = None
    ) -> Int[np.ndarray, "L B K M"]:
        """Returns the table with exactly `width` columns, so that compiled shapes seldom change.

        Args:
          width: number of columns.
          lanes: sequences whose rows must fit; None for all.
        """
        if width <= self.table.shape[-1]:
            whole = self.reserved if lanes is None else self.reserved[:, lanes]
            if (whole > width).any():
                raise CapacityError(f"A row holds more than {width} pages.")
            return self.table[..., :width]
        pad = [(0, 0)] * 3 + [(0, width - self.table.shape[-1])]
        return np.pad(self.table, pad, constant_values=self.no_page)

    def take_changes(self) -> Int[np.ndarray, "2 n"] | None:
        """Returns the cells of the table changed since the last call, (row, column).

        Rows are counted over layers, sequences and heads. A cell that changed twice may appear
        twice. None if copying the whole table is as cheap.
        """
        changes, self._changes, self._num_changes = self._changes, [], 0
        if changes is None:
            return None
        none = np.zeros(0, np.int64)
        return np.stack(
            [np.concatenate([none, *each]) for each in zip((none, none), *changes, strict=True)]
        )

    def _note_changes(self, rows: Int[np.ndarray, " n"], columns: Int[np.ndarray, " n"]) -> None:
        self._num_changes += len(rows)
        if self._num_changes > self.table.size // _CELL_NUMBERS:
            self._changes = None
        if self._changes is not None and len(rows):
            self._changes.append((rows, columns))

    def _widen(self, width: int) -> None:
        if width > self.table.shape[-1]:
            self.table = np.array(self.table_of_width(max(width, 2 * self.table.shape[-1])))


@functools.cache
def few_widths(widest: int, most: int) -> int:
    """Returns the narrowest of a few widths for rows of `widest` pages: 16, 64, 256, ..., `most`.

    Rows with more than `most` pages, which were not planned, take powers of two.
    """
    if widest > most:
        return 1 << (widest - 1).bit_length()
    width = 16
    while width < widest:
        width *= 4
    return most if 2 * width >= most else width


@functools.cache
def few_sizes(pages: int) -> int:
    """Rounds up to 1, 2, 3, 4, 6, 8, 12, 16, 24, ... to keep the number of compiled shapes small.

    # In: 5, 7, 9, 100  Out: 6, 8, 12, 128
    """
    power = 1 << max(pages - 1, 0).bit_length()
    return 3 * power // 4 if pages <= 3 * power // 4 else power


def _cells(
    start: Int[np.ndarray, "L B K"], end: Int[np.ndarray, "L B K"]
) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]:
    """Returns the cells [start, end) of every row as (flat row, column).

    # start: [1, 0]  end: [3, 1]  Out: [0, 0, 1], [1, 2, 0]
    """
    counts = (end - start).ravel()
    rows = np.flatnonzero(counts > 0)
    counts = counts[rows]
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(rows, counts), np.repeat(start.ravel()[rows], counts) + within
