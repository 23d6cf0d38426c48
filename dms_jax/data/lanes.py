"""The sequences of optimizer steps, dealt to lanes, of which each process makes its own.

A step takes B sequences, and its row r is the next sequence of lane r mod L. Lane l packs documents
l, l + L, l + 2 L, ... of the shuffled data. So what a step trains on depends neither on the devices
nor on the processes, and a process tokenizes the documents of its own rows alone.

    # B = L = 4, two processes of two rows   process 0: lanes 0, 1   process 1: lanes 2, 3

L is the number of sequences of a step (their greatest common divisor, if steps differ). The state
of all lanes is saved, and a run may go on with another number of processes. Of fewer documents than
lanes, some lanes read the same: a warning says so.
"""

import collections
import concurrent.futures
import dataclasses
import json
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from dms_jax import processes
from dms_jax.data.batches import Batch, Packing
from dms_jax.data.sources import as_source
from dms_jax.data.tokens import Tokens
from dms_jax.errors import DataError
from dms_jax.model.language_model import PACKAGE

# Documents that are read ahead in all lanes together, by as many threads, and passes that are
# packed ahead.
_DOCUMENTS_AHEAD, _READERS, _PASSES_AHEAD = 32, 2, 2
# Sequences that first fit keeps open in all lanes together, and in one of them.
_OPEN_SEQUENCES, _FEWEST_OPEN_SEQUENCES = 32, 4


@dataclasses.dataclass(frozen=True)
class Deal:
    """Which sequences a process draws.

    Attributes:
      steps: B, the sequences of a step, of every kind of step.
      pass_size: sequences of a pass, of which a step has one or more.
      rows: those of a pass that this process trains on.
    """

    steps: tuple[int, ...]
    pass_size: int
    rows: tuple[int, ...]

    @property
    def lanes(self) -> int:
        """L, the number of lanes of all processes."""
        return math.gcd(*self.steps)


class LaneBatches:
    """An iterator over the rows of this process, one pass after the other, packed ahead.

    Args:
      make: makes the iterator over the sequences of a lane, given its number and how many documents
        it may read ahead. It can be saved and restored as JSON data.
      deal: the rows of this process.
    """

    def __init__(self, make: Callable[[int, int], Any], deal: Deal):
        self._deal = deal
        here = [lane for lane in range(deal.lanes) if lane % deal.pass_size in deal.rows]
        ahead = max(1, _DOCUMENTS_AHEAD // len(here))
        self._lanes = {lane: make(lane, ahead) for lane in here}
        self._packer = concurrent.futures.ThreadPoolExecutor(1, "pack")
        self._coming: collections.deque[concurrent.futures.Future] = collections.deque()
        self._first = 0  # lane of the next pass's first row
        self._state = self._states()

    def __iter__(self) -> "LaneBatches":
        return self

    def __next__(self) -> Batch:
        while len(self._coming) < _PASSES_AHEAD:
            self._coming.append(self._packer.submit(self._pack))
        batch, self._state = self._coming.popleft().result()
        return batch

    def _pack(self) -> tuple[Batch, dict[str, Any]]:
        """Returns the rows of the next pass, and the state after it."""
        drawn = [next(self._lanes[self._first + row]) for row in self._deal.rows]
        self._first = (self._first + self._deal.pass_size) % self._deal.lanes
        return {name: np.stack([row[name] for row in drawn]) for name in drawn[0]}, self._states()

    def _states(self) -> dict[str, Any]:
        return {str(lane): iterator.get_state() for lane, iterator in self._lanes.items()}

    def get_state(self) -> dict[str, Any]:
        """Returns the state of the lanes of all processes as JSON data; all of them call it."""
        everywhere: dict[str, Any] = {}
        for text in processes.gather(json.dumps(self._state)):
            everywhere |= json.loads(text)
        return {"lanes": everywhere}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores a state of the end of a step, in whatever number of processes.

        Raises:
          DataError: it is of steps of another size.
        """
        lanes = state["lanes"]
        if len(lanes) != self._deal.lanes:
            raise DataError(
                f"The data of this run were dealt to {len(lanes)} sequences a step, and the recipe "
                f"has {self._deal.lanes}. Give the same batch sizes to resume it."
            )
        for each in self._coming:
            each.cancel()
        concurrent.futures.wait(self._coming)
        self._coming.clear()
        for lane, iterator in self._lanes.items():
            iterator.set_state(lanes[str(lane)])
        self._first, self._state = 0, self._states()


def lane_batches(
    data: Any,
    tokenizer: Any,
    *,
    deal: Deal,
    length: int,
    packing: Packing,
    vocab_size: int,
    seed: int,
) -> LaneBatches:
    """Returns the iterator over the passes of optimizer steps.

    Args:
      deal: which rows of which steps this process draws.
      data, tokenizer, length, packing, vocab_size, seed: as for `batches`.

    Raises:
      DataError: the data cannot be used.
    """
    import grain

    from dms_jax.data import packing as packings
    from dms_jax.data.lane_documents import LaneDocuments

    documents = Tokens(as_source(data), tokenizer, vocab_size)
    if len(documents) < deal.lanes:
        warnings.warn(
            f"A step takes {deal.lanes} sequences, each of other documents, and there are "
            f"{len(documents)}: some sequences of a step repeat others, token by token. Give more "
            "documents (a long text in parts, with <|endoftext|> between them), or a smaller "
            "batch_size.",
            skip_file_prefixes=(PACKAGE,),
        )
    dataset = grain.MapDataset.source(documents).seed(seed % 2**32).shuffle().repeat()
    readers = concurrent.futures.ThreadPoolExecutor(_READERS, "tokenize")
    bins = max(_FEWEST_OPEN_SEQUENCES, _OPEN_SEQUENCES // deal.lanes)
    # A lane may meet the only document with tokens a few epochs late.
    most_empty = 2 * len(documents) + 64 * deal.lanes

    def make(lane: int, ahead: int) -> Any:
        stream = packings.NonEmpty(
            LaneDocuments(dataset, lane, deal.lanes, readers, ahead), max_empty=most_empty
        )
        if packing == "first_fit":
            packed = packings.first_fit(
                stream, documents, length=length, bins=bins, seed=seed + lane
            )
        else:
            packed = packings.Concatenate(
                stream, documents, length=length, carry=packing == "concatenate"
            )
        return iter(packed)

    return LaneBatches(make, deal)
