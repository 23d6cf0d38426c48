"""Streams of tokenized documents: in shuffled order, read ahead in threads, resumable.

`one_stream` has all documents. `split_streams` deals them to S streams: stream s has documents s, s
+ S, s + 2 S, ... of the shuffled data. It creates only the requested streams, so a process
tokenizes only the documents of its streams. The order depends on the seed, not on the number of
threads or processes.

This module imports Grain; import it only where it is used.
"""

import collections
import concurrent.futures
import os
from collections.abc import Collection
from typing import Any

import grain

from dms_jax.data.tokenization import Tokenized, TokenizedDocuments
from dms_jax.errors import DataError

# Threads that read and tokenize the documents of one stream.
WORKERS = max(2, min(16, (os.cpu_count() or 1) // 2))
# Threads that do this for split streams, and the number of documents that they read ahead.
_READERS, _DOCUMENTS_AHEAD = 2, 32


def one_stream(
    documents: TokenizedDocuments, *, seed: int | None, repeat: bool
) -> grain.IterDataset:
    """Returns the stream of all non-empty documents.

    Args:
      documents: the documents.
      seed: seed of their order, which is new in each epoch; None keeps the data's order.
      repeat: whether to start over at the end.
    """
    options = grain.ReadOptions(num_threads=WORKERS, prefetch_buffer_size=8 * WORKERS)
    stream = _ordered(documents, seed, repeat).to_iter_dataset(options)
    # The only non-empty document may come first in one epoch and last in the next.
    return _NonEmpty(stream, max_empty=2 * len(documents))


def split_streams(
    documents: TokenizedDocuments, count: int, numbers: Collection[int], *, seed: int
) -> dict[int, grain.IterDataset]:
    """Returns endless streams of the non-empty documents, by number.

    Args:
      documents: the documents of all streams.
      count: S, the number of streams; if there are fewer documents, some streams are equal.
      numbers: the streams to create, of 0 ... S - 1.
      seed: seed of the order of the documents, which is new in each epoch.
    """
    ordered = _ordered(documents, seed, repeat=True)
    readers = concurrent.futures.ThreadPoolExecutor(_READERS, "tokenize")
    ahead = max(1, _DOCUMENTS_AHEAD // len(numbers))
    # A stream may reach the only non-empty document a few epochs late.
    max_empty = 2 * len(documents) + 64 * count
    return {
        number: _NonEmpty(_Every(ordered, number, count, readers, ahead), max_empty)
        for number in numbers
    }


def _ordered(
    documents: TokenizedDocuments, seed: int | None, repeat: bool
) -> grain.MapDataset[Tokenized]:
    dataset = grain.MapDataset.source(documents)
    dataset = dataset if seed is None else dataset.seed(seed % 2**32).shuffle()
    return dataset.repeat() if repeat else dataset


class _Every(grain.IterDataset):
    """Every S-th document, with a few read ahead.

    Args:
      dataset: the documents in their order.
      first, stride: index of the first document, and the distance to the next.
      readers: the threads, which several streams share.
      ahead: number of documents to read ahead.
    """

    def __init__(
        self,
        dataset: grain.MapDataset,
        first: int,
        stride: int,
        readers: concurrent.futures.Executor,
        ahead: int,
    ):
        super().__init__()
        self._options = (dataset, first, stride, readers, ahead)

    def __iter__(self) -> grain.DatasetIterator:
        return _EveryIterator(*self._options)


class _EveryIterator(grain.DatasetIterator):
    """The state is the number of documents taken."""

    def __init__(self, dataset: Any, first: int, stride: int, readers: Any, ahead: int):
        super().__init__()
        self._dataset, self._first, self._stride = dataset, first, stride
        self._readers, self._ahead = readers, ahead
        self._taken = 0
        self._prefetched: collections.deque[concurrent.futures.Future] = collections.deque()

    def __next__(self) -> Tokenized:
        while len(self._prefetched) < self._ahead:
            index = self._first + self._stride * (self._taken + len(self._prefetched))
            self._prefetched.append(self._readers.submit(self._dataset.__getitem__, index))
        document = self._prefetched.popleft().result()
        self._taken += 1
        return document

    def get_state(self) -> dict[str, Any]:
        return {"taken": self._taken}

    def set_state(self, state: dict[str, Any]) -> None:
        for each in self._prefetched:
            each.cancel()
        self._prefetched.clear()
        self._taken = state["taken"]


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
