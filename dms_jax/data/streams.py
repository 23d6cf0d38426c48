"""Streams of tokenized documents in shuffled order, resumable.

Stream s of S has documents s, s + S, s + 2 S, ... of the shuffled data. Only the requested streams
are created, so a process tokenizes only the documents of its streams. The order depends on the
seed, not on the number of processes. Documents are read in the caller's thread: tokenizers hold
Python's lock, so more threads would read no faster.

This module imports Grain; import it only where it is used.
"""

from collections.abc import Callable, Collection

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
        number: ordered[number::count].to_iter_dataset(options).filter(_non_empty(max_empty))
        for number in numbers
    }


def _non_empty(max_empty: int) -> Callable[[Tokenized], bool]:
    """Returns whether a document has tokens.

    Args:
      max_empty: number of consecutive empty documents after which the data counts as empty.
    """
    empty = 0

    def has_tokens(document: Tokenized) -> bool:
        nonlocal empty
        empty = 0 if len(document["tokens"]) else empty + 1
        if empty > max_empty:
            raise DataError("The documents contain no tokens to train on.")
        return not empty

    return has_tokens
