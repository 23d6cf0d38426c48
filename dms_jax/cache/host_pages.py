"""Pages in host memory: contents of pages that cached prefixes gave up on the device.

Equal pages on the host and the device are linked, so that prefixes that share a page on the device
share it here too, and nothing is copied twice:

    device   page 7 (prefixes A, B)     A leaves:  page 7 is copied to host page 2, B keeps page 7
    host                                B leaves:  host page 2 again, and page 7 is free

Copies to the host run in the background, in a thread of their own; reads here wait for them.
"""

import collections
import concurrent.futures
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

NO_PAGE = -1
_IN_FLIGHT = 8  # blocks on their way to the host; the device holds them beside its pool
_thread = concurrent.futures.ThreadPoolExecutor(1, "dms_jax host pages")  # NumPy releases the GIL


class HostPages:
    """A pool of pages in host memory, allocated as it fills.

    Args:
      block: shapes of a block of pages, leaves [n, ...]; pages are copied in such blocks.
      num_pages: pages of this pool.
      device_pages: pages of the device's pool.
    """

    def __init__(self, block: Any, num_pages: int, device_pages: int):
        self._pages = jax.tree.map(lambda x: np.empty((num_pages, *x.shape[1:]), x.dtype), block)
        self.block = jax.tree.leaves(block)[0].shape[0]
        self._uses = np.zeros(num_pages, np.int32)
        self._free = np.arange(num_pages, dtype=np.int32)[::-1]
        self._device_of = np.full(num_pages, NO_PAGE, np.int32)
        self._host_of = np.full(device_pages, NO_PAGE, np.int32)
        self._writing = collections.deque[concurrent.futures.Future[None]]()  # oldest first

    @property
    def used(self) -> int:
        """Number of host pages in use; one that several prefixes share counts once."""
        return len(self._uses) - len(self._free)

    def bytes_of(self, pages: Int[np.ndarray, " n"]) -> int:
        """Returns the bytes of the given device pages that are not here yet."""
        missing = int(np.count_nonzero(self._host_of[pages] == NO_PAGE))
        return missing * sum(x[0].nbytes for x in jax.tree.leaves(self._pages))

    def add(
        self,
        pages: Int[np.ndarray, " n"],
        read: Callable[[Int[np.ndarray, " n"]], Any],
        make_room: Callable[[], bool],
    ) -> Int[np.ndarray, " n"] | None:
        """Copies device pages that are not here yet; returns the host page of each.

        Args:
          pages: pages of the device.
          read: launches the copy of a block of pages; returns its arrays on the device.
          make_room: drops the oldest prefix here; returns False if there is none.

        Returns:
          None if there is no room.
        """
        slots = self._host_of[pages]
        known = slots != NO_PAGE
        self._uses[slots[known]] += 1  # before making room for other pages
        missing = pages[~known]
        while len(missing) > len(self._free):
            # If the pages can never fit, evict nothing.
            if len(missing) > len(self._uses) or not make_room():
                self.drop(slots[known])
                return None
        self._free, own = np.split(self._free, [len(self._free) - len(missing)])
        self._uses[own] = 1
        slots[~known] = own
        self.match(own, missing)
        for start in range(0, len(own), self.block):
            some = slice(start, start + self.block)
            arrays = read(missing[some])
            for leaf in jax.tree.leaves(arrays):
                leaf.copy_to_host_async()
            self._writing.append(_thread.submit(self._write, own[some], arrays))
            self._wait(leave=_IN_FLIGHT)
        return slots

    def read(self, slots: Int[np.ndarray, " n"]) -> Iterator[tuple[Int[np.ndarray, " b"], Any]]:
        """Yields blocks of pages: their indices in `slots`, and contents, padded to a block."""
        self._wait()
        for start in range(0, len(slots), self.block):
            which = np.arange(start, min(start + self.block, len(slots)))
            padded = np.resize(slots[which], self.block)
            yield which, jax.tree.map(lambda x, own=padded: x[own], self._pages)

    def _write(self, slots: Int[np.ndarray, " n"], arrays: Any) -> None:
        for own, block in zip(*map(jax.tree.leaves, (self._pages, arrays)), strict=True):
            own[slots] = np.asarray(block)[: len(slots)]

    def _wait(self, leave: int = 0) -> None:
        """Waits for copies, all but the last `leave`."""
        while len(self._writing) > leave:
            self._writing.popleft().result()

    def drop(self, slots: Int[np.ndarray, " n"]) -> None:
        """Ends the use of pages by a prefix."""
        self._uses[slots] -= 1
        freed = slots[self._uses[slots] == 0]
        self._free = np.concatenate([self._free, freed])
        held = self._device_of[freed]
        self._host_of[held[held != NO_PAGE]] = NO_PAGE
        self._device_of[freed] = NO_PAGE

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
        self._wait()
        self._uses[:] = 0
        self._free = np.arange(len(self._uses), dtype=np.int32)[::-1]
        self._device_of[:] = NO_PAGE
        self._host_of[:] = NO_PAGE
