"""The sequences of optimizer steps, dealt to lanes, of which each process makes its own.

A step takes B sequences, and its row r is the next sequence of lane r mod L. Lane l packs documents
l, l + L, l + 2 L, ... of the shuffled data. So what a step trains on depends neither on the devices
nor on the processes, and a process tokenizes the documents of its own rows alone.

    # B = L = 4, two processes of two rows   process 0: lanes 0, 1   process 1: lanes 2, 3

L is the number of sequences of a step (of the shortest step, if steps differ). The state of all
lanes is saved, and a run may go on with another number of processes.
"""

import collections
import concurrent.futures
import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from dms_jax import processes
from dms_jax.errors import DataError

Row = dict[str, np.ndarray]

# Documents that are read ahead, in all lanes together.
_AHEAD = 32


@dataclasses.dataclass(frozen=True)
class Deal:
    """Which sequences a process draws.

    Attributes:
      steps: B, the sequences of a step, of every kind of step.
      pass_size: sequences of a pass, of which a step has several.
      rows: those of a pass that this process trains on.
    """

    steps: tuple[int, ...]
    pass_size: int
    rows: tuple[int, ...]


class LaneBatches:
    """Draws the rows of steps.

    Args:
      make: makes the iterator over the sequences of a lane, given its number, the number of lanes
        and how many documents it may read ahead. It can be saved and restored as JSON data.
      deal: the rows of this process.
    """

    def __init__(self, make: Callable[[int, int, int], Any], deal: Deal):
        self._count, self._deal = math.gcd(*deal.steps), deal
        here = [lane for lane in range(self._count) if lane % deal.pass_size in deal.rows]
        ahead = max(1, _AHEAD // len(here))
        self._lanes = {lane: make(lane, self._count, ahead) for lane in here}

    def draw(self, number: int) -> Row:
        """Returns this process's rows of a pass, by the number of the pass within its step."""
        first = number * self._deal.pass_size
        drawn = [next(self._lanes[(first + row) % self._count]) for row in self._deal.rows]
        return {name: np.stack([row[name] for row in drawn]) for name in drawn[0]}

    def get_state(self) -> dict[str, Any]:
        """Returns the state of the lanes of all processes as JSON data; all of them call it."""
        own = {str(lane): iterator.get_state() for lane, iterator in self._lanes.items()}
        everywhere: dict[str, Any] = {}
        for text in processes.gather(json.dumps(own)):
            everywhere |= json.loads(text)
        return {"lanes": everywhere}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores a state that `get_state` returned, in whatever number of processes.

        Raises:
          DataError: it is of steps of another size.
        """
        lanes = state["lanes"]
        if len(lanes) != self._count:
            raise DataError(
                f"The data of this run were dealt to {len(lanes)} sequences a step, and the recipe "
                f"has {self._count}. Give the same batch sizes to resume it."
            )
        for lane, iterator in self._lanes.items():
            iterator.set_state(lanes[str(lane)])


class Reader:
    """Reads every L-th document from a random-access dataset, some of them ahead in threads.

    Args:
      dataset: the documents in their order, as a Grain dataset.
      first, stride: the first of them, and the distance to the next.
      pool: the threads.
      ahead: how many documents are read before they are asked for.
    """

    def __init__(
        self,
        dataset: Any,
        first: int,
        stride: int,
        pool: concurrent.futures.Executor,
        ahead: int,
    ):
        self._dataset, self._first, self._stride = dataset, first, stride
        self._pool, self._ahead = pool, ahead
        self._taken = 0
        self._coming: collections.deque[concurrent.futures.Future] = collections.deque()

    def __next__(self) -> Row:
        while len(self._coming) < self._ahead:
            index = self._first + self._stride * (self._taken + len(self._coming))
            if index >= len(self._dataset):
                break
            self._coming.append(self._pool.submit(self._dataset.__getitem__, index))
        if not self._coming:
            raise StopIteration
        document = self._coming.popleft().result()
        self._taken += 1
        return document

    def get_state(self) -> dict[str, int]:
        """Returns how many documents were taken."""
        return {"taken": self._taken}

    def set_state(self, state: dict[str, int]) -> None:
        """Goes on after as many documents as were taken."""
        for each in self._coming:
            each.cancel()
        self._coming.clear()
        self._taken = state["taken"]
