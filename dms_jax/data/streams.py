"""Streams of tokenized documents in shuffled order, resumable.

Stream s of S has documents s, s + S, s + 2 S, ... of the shuffled data. Only the requested streams
are created, so a process tokenizes only the documents of its streams. The order depends on the
seed, not on the number of processes. Documents are read in the caller's thread: tokenizers hold
Python's lock, so more threads would read no faster.

This module imports Grain; import it only where it is used.
"""

from collections.abc import Collection
from typing import Any

import grain

from dms_jax.data.tokenization import Tokenized, TokenizedDocuments
from dms_jax.errors import DataError


def streams(
    documents: TokenizedDocuments,
    count: int,
    numbers: Collection[int],
    *,
    seed: int | None,
    repeat: bool = True,
) -> dict[int, grain.IterDataset]:
    """Returns streams of the non-empty documents, by number.

    Args:
      documents: the documents of all streams.
      count: S, the number of streams; if there are fewer documents, some streams are equal.
      numbers: the streams to create, of 0 ... S - 1.
      seed: seed of the order of the documents, which is new in each epoch; None keeps the data's
        order.
      repeat: whether to start over at the end.
    """
    ordered = grain.MapDataset.source(documents)
    ordered = ordered if seed is None else ordered.seed(seed % 2**32).shuffle()
    ordered = ordered.repeat() if repeat else ordered
    # The only non-empty document may come first in one epoch and last in the next, and a stream may
    # reach it a few epochs late.
    max_empty = 2 * len(documents) + 64 * (count - 1)
    options = grain.ReadOptions(num_threads=0)
    return {
        number: _NonEmpty(ordered[number::count].to_iter_dataset(options), max_empty)
        for number in numbers
    }


class _NonEmpty(grain.IterDataset):
    """The non-empty documents of a stream.

    Args:
      parent: the stream.
      max_empty: number of consecutive empty documents after which the data counts as empty.
    """

    def __init__(self, parent: grain.IterDataset, max_empty: int):
        super().__init__(parent)
        self._max_empty = max_empty

    def __iter__(self) -> grain.DatasetIterator:
        return _NonEmptyIterator(iter(self._parent), self._max_empty)


class _NonEmptyIterator(grain.DatasetIterator):
    def __init__(self, parent: grain.DatasetIterator, max_empty: int):
        super().__init__(parent)
        self._max_empty = max_empty

    def __next__(self) -> Tokenized:
        for _ in range(self._max_empty + 1):
            document = next(self._parent)
            if len(document["tokens"]):
                return document
        raise DataError("The documents contain no tokens to train on.")

    def get_state(self) -> dict[str, Any]:
        return self._parent.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        self._parent.set_state(state)
