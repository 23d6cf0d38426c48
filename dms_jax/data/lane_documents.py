"""The documents of a lane, as a Grain dataset; import this module only where it is used."""

import collections
import concurrent.futures
from typing import Any

import grain
import numpy as np


class LaneDocuments(grain.IterDataset):
    """Every L-th document of a random-access dataset, some of them read ahead in threads.

    Args:
      dataset: the documents in their order, as a Grain dataset.
      first, stride: the first of them, and the distance to the next.
      pool: the threads.
      ahead: how many documents are read before they are asked for.
    """

    def __init__(
        self,
        dataset: grain.MapDataset,
        first: int,
        stride: int,
        pool: concurrent.futures.Executor,
        ahead: int,
    ):
        super().__init__()
        self._options = (dataset, first, stride, pool, ahead)

    def __iter__(self) -> grain.DatasetIterator:
        return _LaneIterator(*self._options)


class _LaneIterator(grain.DatasetIterator):
    """Its state is how many documents were taken."""

    def __init__(self, dataset: Any, first: int, stride: int, pool: Any, ahead: int):
        super().__init__()
        self._dataset, self._first, self._stride = dataset, first, stride
        self._pool, self._ahead = pool, ahead
        self._taken = 0
        self._coming: collections.deque[concurrent.futures.Future] = collections.deque()

    def __next__(self) -> dict[str, np.ndarray]:
        while len(self._coming) < self._ahead:
            index = self._first + self._stride * (self._taken + len(self._coming))
            self._coming.append(self._pool.submit(self._dataset.__getitem__, index))
        document = self._coming.popleft().result()
        self._taken += 1
        return document

    def get_state(self) -> dict[str, Any]:
        return {"taken": self._taken}

    def set_state(self, state: dict[str, Any]) -> None:
        for each in self._coming:
            each.cancel()
        self._coming.clear()
        self._taken = state["taken"]
