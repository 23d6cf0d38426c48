"""Pages in host memory: contents of pages that cached prefixes gave up on the device.

Equal pages on the host and the device are linked, so that prefixes that share a page on the device
share it here too, and nothing is copied twice:

    device   page 7 (prefixes A, B)     A leaves:  page 7 is copied to host page 2, B keeps page 7
    host                                B leaves:  host page 2 again, and page 7 is free

Pages are copied in blocks of two sizes, each a JAX array in pinned memory, so that no copy takes
the host's time. The memory of a block is free once none of its pages is in use.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

NO_PAGE = -1
# Bytes of a block. What is left beyond large blocks goes into small ones.
_LARGE, _SMALL = 2**24, 2**21
_IN_FLIGHT = 2**27  # bytes on their way to the host; the device holds them beside its pool


def to_host(tree: Any) -> Any:
    """Launches a copy of arrays to pinned host memory."""
    return _moved(tree, "pinned_host")


def to_device(tree: Any) -> Any:
    """Launches a copy of arrays to their device; arrays that are there stay."""
    return _moved(tree, "device")


def _moved(tree: Any, memory: str) -> Any:
    return jax.tree.map(lambda x: jax.device_put(x, x.sharding.with_memory_kind(memory)), tree)


@dataclasses.dataclass
class _Block:
    """A block of pages on the host.

    Attributes:
      arrays: their contents, leaves [size, ...].
      size: number of pages, those not in use included.
      used: number of pages in use.
    """

    arrays: Any
    size: int
    used: int


class HostPages:
    """A pool of pages in host memory, allocated as it fills.

    Args:
      num_pages: pages of this pool.
      page_bytes: bytes of a page.
      device_pages: pages of the device's pool.

    Attributes:
      sizes: the sizes of blocks, in pages.
      used: number of pages that blocks take; one that several prefixes share counts once.
    """

    def __init__(self, num_pages: int, page_bytes: int, device_pages: int):
        self.sizes = block_sizes(num_pages, page_bytes, device_pages)
        self._page_bytes, self._invalid = page_bytes, device_pages
        self._uses = np.zeros(num_pages, np.int32)
        self._free = np.arange(num_pages, dtype=np.int32)[::-1]
        self._device_of = np.full(num_pages, NO_PAGE, np.int32)
        self._host_of = np.full(device_pages, NO_PAGE, np.int32)
        self._blocks: dict[int, _Block] = {}
        self._next_block = 0
        self.used, self._allocated = 0, False
        self._block_of = np.zeros(num_pages, np.int64)  # of each page, and its place there
        self._place_of = np.zeros(num_pages, np.int32)
        self._leaving = collections.deque[_Block]()  # on their way here, oldest first

    def allocate(self, place: jax.sharding.Sharding) -> None:
        """Allocates all memory of the pool, for pages of the device at `place`.

        Pinning takes about a second per GB on an H200's host. Without this call the first copies
        wait for it; JAX keeps the memory.
        """
        if not self._allocated and all(each.platform == "gpu" for each in place.device_set):
            self._allocated = True
            block = jax.device_put(np.zeros(_LARGE, np.uint8), place)
            count = -(-len(self._uses) * self._page_bytes // _LARGE)
            jax.block_until_ready([to_host(block) for _ in range(count)])

    def cost(self, pages: Int[np.ndarray, " n"]) -> int:
        """Returns the bytes to copy for those device pages that are not here yet.

        A small block counts as a large one, since launching its copy takes as long.
        """
        missing = int(np.count_nonzero(self._host_of[pages] == NO_PAGE))
        return len(self._split(missing)) * self.sizes[-1] * self._page_bytes

    @property
    def is_busy(self) -> bool:
        """Whether so much is on its way here that another copy would have to wait."""
        while self._leaving and _has_arrived(self._leaving[0]):
            self._leaving.popleft()
        return self._bytes_in_flight > _IN_FLIGHT

    @property
    def _bytes_in_flight(self) -> int:
        return sum(block.size for block in self._leaving) * self._page_bytes

    def add(
        self,
        pages: Int[np.ndarray, " n"],
        read: Callable[[Int[np.ndarray, " b"]], Any],
        make_room: Callable[[], bool],
    ) -> Int[np.ndarray, " n"] | None:
        """Copies device pages that are not here yet; returns the host page of each.

        Args:
          pages: pages of the device.
          read: launches the copy of a block of pages, padded with invalid ones; returns its arrays
            on the device.
          make_room: drops the oldest prefix here; returns False if there is none.

        Returns:
          None if there is no room.
        """
        slots = self._host_of[pages]
        known = slots != NO_PAGE
        self._uses[slots[known]] += 1  # before making room for other pages
        missing = pages[~known]
        sizes = self._split(len(missing))
        while sum(sizes) + self.used > len(self._uses):
            # If the pages can never fit, evict nothing.
            if sum(sizes) > len(self._uses) or not make_room():
                self.drop(slots[known])
                return None
        self._free, own = np.split(self._free, [len(self._free) - len(missing)])
        self._uses[own] = 1
        slots[~known] = own
        self.match(own, missing)
        for start, size in zip(np.cumsum([0, *sizes]), sizes, strict=False):
            some = own[start : start + size]
            self._block_of[some], self._place_of[some] = self._next_block, np.arange(len(some))
            padded = self._padded(size, missing[start : start + size])
            block = _Block(to_host(read(padded)), size, len(some))
            self._blocks[self._next_block] = block
            self._next_block, self.used = self._next_block + 1, self.used + size
            self._leaving.append(block)
            while self._bytes_in_flight > _IN_FLIGHT and len(self._leaving) > 1:
                jax.block_until_ready(self._leaving.popleft().arrays)
        return slots

    def read(
        self, slots: Int[np.ndarray, " n"], pages: Int[np.ndarray, " n"]
    ) -> Iterator[tuple[Int[np.ndarray, " b"], Any]]:
        """Launches copies of host pages to the device.

        Yields for each block the device pages (`pages`) to write its pages to, invalid ones where
        they are not wanted, and its arrays on the device.
        """
        blocks = self._block_of[slots]
        for number in np.unique(blocks).tolist():
            which, block = blocks == number, self._blocks[number]
            targets = self._padded(block.size, pages[which], self._place_of[slots[which]])
            yield targets, to_device(block.arrays)

    def _split(self, count: int) -> list[int]:
        """Returns the sizes of blocks for `count` pages."""
        small, large = self.sizes[0], self.sizes[-1]
        whole, rest = divmod(count, large)
        rest = -(-rest // small)
        return [large] * (whole + 1) if rest * small >= large else [large] * whole + [small] * rest

    def _padded(
        self, size: int, pages: Int[np.ndarray, " n"], places: Int[np.ndarray, " n"] | None = None
    ) -> Int[np.ndarray, " b"]:
        """Returns a block of device pages, with invalid ones at all other places."""
        padded = np.full(size, self._invalid, np.int32)
        padded[slice(len(pages)) if places is None else places] = pages
        return padded

    def drop(self, slots: Int[np.ndarray, " n"]) -> None:
        """Ends the use of pages by a prefix."""
        self._uses[slots] -= 1
        freed = slots[self._uses[slots] == 0]
        self._free = np.concatenate([self._free, freed])
        held = self._device_of[freed]
        self._host_of[held[held != NO_PAGE]] = NO_PAGE
        self._device_of[freed] = NO_PAGE
        blocks, counts = np.unique(self._block_of[freed], return_counts=True)
        for number, count in zip(blocks.tolist(), counts.tolist(), strict=True):
            self._blocks[number].used -= count
            if not self._blocks[number].used:
                self.used -= self._blocks.pop(number).size

    def on_device(self, slots: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
        """Returns the equal device page of each host page; NO_PAGE without one."""
        return self._device_of[slots]

    def match(self, slots: Int[np.ndarray, " n"], pages: Int[np.ndarray, " n"]) -> None:
        """Links equal pages here and on the device."""
        self._device_of[slots], self._host_of[pages] = pages, slots

    def forget_device(self, pages: Int[np.ndarray, " n"]) -> None:
        """Unlinks device pages, which are free now."""
        slots = self._host_of[pages]
        self._device_of[slots[slots != NO_PAGE]] = NO_PAGE
        self._host_of[pages] = NO_PAGE

    def clear(self) -> None:
        """Drops all pages and their links to device pages."""
        self._blocks.clear()
        self._leaving.clear()
        self.used = 0
        self._uses[:] = 0
        self._free = np.arange(len(self._uses), dtype=np.int32)[::-1]
        self._device_of[:] = NO_PAGE
        self._host_of[:] = NO_PAGE


def block_sizes(num_pages: int, page_bytes: int, device_pages: int) -> tuple[int, ...]:
    """Returns the sizes of blocks in pages, ascending; a block is a small part of the pool."""
    small = min(_SMALL // page_bytes, num_pages // 16, device_pages)
    large = min(_LARGE // page_bytes, num_pages // 2, device_pages)
    return tuple(sorted({max(small, 1), max(large, 1)}))


def _has_arrived(block: _Block) -> bool:
    return all(leaf.is_ready() for leaf in jax.tree.leaves(block.arrays))
