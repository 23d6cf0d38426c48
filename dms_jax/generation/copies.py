"""Copies of cached states into lanes, collected and launched together.

A launch takes the host's time however little it copies. With two or three for each state, they were
29% of the time of an engine that served 16 agents (`py-spy`, H200, 1.5B model, DMS).
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from dms_jax.cache import Cache
from dms_jax.cache.host_pages import to_device
from dms_jax.generation import programs

# Bytes of pages copied at a time; the device holds them twice meanwhile.
_LARGE, _SMALL = 2**29, 2**25
# Lanes whose states are read or loaded at a time.
_LANES = 8


@dataclasses.dataclass(frozen=True)
class Load:
    """The state of a sequence for an empty lane.

    Attributes:
      lengths: slots in use of each row.
      tokens: number of tokens of the sequence.
      rows: the policy's state of each row, leaves [L, K, ...].
    """

    lengths: Int[np.ndarray, "L K"]
    tokens: int
    rows: Any


class Copies:
    """Copies that are not launched yet: of pages, and of states to lanes.

    Args:
      num_lanes: lanes of the cache.
      num_pages: pages of the pool.
      page_bytes: bytes of a page.

    Attributes:
      group: number of lanes that a program reads or loads.
      blocks: numbers of pages that programs copy at a time, ascending.
    """

    def __init__(self, num_lanes: int, num_pages: int, page_bytes: int):
        self._num_lanes, self._no_page = num_lanes, num_pages
        self.group = min(_LANES, num_lanes)
        most = max(num_pages // 16, 1)
        self.blocks = tuple(
            sorted({min(each // page_bytes, most) or 1 for each in (_SMALL, _LARGE)})
        )
        # Each round is launched after the one before it; within one, the order does not matter
        # beyond that of the blocks.
        self._rounds = [_Round()]
        self._written = np.zeros(num_pages, bool)  # pages that the last round writes

    def __bool__(self) -> bool:
        return bool(self._rounds[0])

    def add_pages(self, sources: Int[np.ndarray, " n"], targets: Int[np.ndarray, " n"]) -> None:
        """Adds copies of pages from source to target; none is both."""
        if self._written[sources].any() or self._written[targets].any():
            self._begin_round()
        self._rounds[-1].pages.append(np.stack([sources, targets]))
        self._written[targets] = True

    def add_load(self, lane: int, load: Load) -> None:
        """Adds the state of a lane, which has the pages of the sequence."""
        if lane in self._rounds[-1].loads:
            self._begin_round()
        self._rounds[-1].loads[lane] = load

    def _begin_round(self) -> None:
        self._rounds.append(_Round())
        self._written[:] = False

    def launched(self, cache: Cache) -> Cache:
        """Launches all copies; returns the cache after them."""
        rounds, self._rounds = self._rounds, [_Round()]
        self._written[:] = False
        for each in rounds:
            for pages in self._blocks_of(each.pages):
                cache = programs.copy_pages(cache, pages)
            for lanes, loads in self._groups_of(each.loads):
                lengths = np.stack([load.lengths for load in loads]).astype(np.int32)
                tokens = np.asarray([load.tokens for load in loads], np.int32)
                rows = tuple(to_device(load.rows) for load in loads)
                cache = programs.load_lanes(cache, lanes, lengths, tokens, rows)
        return cache

    def _blocks_of(self, pairs: list[Int[np.ndarray, "2 _"]]) -> Iterator[Int[np.ndarray, "2 b"]]:
        """Yields (source, target) pages in blocks, filled with pages that are not written."""
        small, large = self.blocks[0], self.blocks[-1]
        left = np.concatenate([np.empty((2, 0), np.int32), *pairs], axis=1)
        while left.shape[1]:
            size = small if left.shape[1] <= small else large
            block = np.full((2, size), self._no_page, np.int32)
            block[:, : min(size, left.shape[1])] = left[:, :size]
            left = left[:, size:]
            yield block

    def _groups_of(
        self, loads: dict[int, Load]
    ) -> Iterator[tuple[Int[np.ndarray, " n"], list[Load]]]:
        """Yields lanes and their states in groups, filled with lanes that do not exist."""
        for lanes in self.grouped(list(loads)):
            given = [loads[lane] for lane in lanes.tolist() if lane < self._num_lanes]
            yield lanes, given + given[:1] * (len(lanes) - len(given))

    def grouped(self, lanes: list[int]) -> Iterator[Int[np.ndarray, " n"]]:
        """Yields lanes in groups, the last one filled with lanes that do not exist."""
        for some in itertools.batched(lanes, self.group):
            group = np.full(self.group, self._num_lanes, np.int32)
            group[: len(some)] = some
            yield group


@dataclasses.dataclass
class _Round:
    """Copies and loads for one launch.

    No copy touches a page that an earlier one writes, and each lane is loaded once.
    """

    pages: list[Int[np.ndarray, "2 _"]] = dataclasses.field(default_factory=list)
    loads: dict[int, Load] = dataclasses.field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.pages or self.loads)


def no_load(cache: Cache, lanes: Int[np.ndarray, " n"]) -> tuple[Any, ...]:
    """Returns arguments of `programs.load_lanes` as for those lanes, to compile it."""
    layers, _, kv_heads = cache.lengths.shape
    rows = jax.tree.map(lambda x: np.zeros((x.shape[0], *x.shape[2:]), x.dtype), cache.row_state)
    lengths = np.zeros((len(lanes), layers, kv_heads), np.int32)
    return cache, lanes, lengths, np.zeros(len(lanes), np.int32), (rows,) * len(lanes)
