"""Documents to batches: tokenize, shuffle, pack, batch. The iterator can be saved and resumed.

    batches(source, tokenizer, batch_size=4, length=512)
      -> {"tokens": int32 [B, T], "loss_mask": bool [B, T], "segment_ids": int32 [B, T] or absent}

`encoding.py` says how documents become tokens. Documents are read and tokenized, and batches are
packed, by threads of their own while the device trains.
"""

import os
import weakref
from typing import Any, Literal

import numpy as np

from dms_jax.checks import Count, check
from dms_jax.data.encodable import encodable
from dms_jax.data.sources import as_source
from dms_jax.data.tokens import Tokens

Packing = Literal["concatenate", "concatenate_whole", "first_fit"]
Batch = dict[str, np.ndarray]

_OPEN_SEQUENCES = 32
_PACKED_AHEAD = 2
# Threads that read and tokenize documents ahead; their number does not change the order.
WORKERS = max(2, min(16, (os.cpu_count() or 1) // 2))


class Batches:
    """An iterator over batches whose state can be saved as JSON data and restored."""

    def __init__(self, iterator: Any):
        self._kept = [iterator]
        # A thread that reads ahead would wait for room in its queue for ever. At the end of the
        # interpreter this comes before modules are emptied, on which `__del__` would stumble.
        weakref.finalize(self, _let_go, self._kept)

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> Batch:
        return next(self._kept[0])

    def get_state(self) -> dict[str, Any]:
        """Returns the state of the iterator as JSON data."""
        return self._kept[0].get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores a state that `get_state` of an iterator over the same data returned."""
        self._kept[0].set_state(state)

    def close(self) -> None:
        """Ends the threads that read and pack ahead."""
        self._kept[0].close()


def _let_go(kept: list[Any]) -> None:
    """Closes the iterator, of which nothing stays."""
    kept.pop().close()


def batches(
    data: Any,
    tokenizer: Any = None,
    *,
    batch_size: int,
    length: int,
    packing: Packing = "concatenate",
    vocab_size: int | None = None,
    seed: int | None = 0,
    repeat: bool = True,
) -> Batches:
    """Returns an iterator over batches.

    Args:
      data: a source, paths, texts, conversations or token ids; see `as_source`. Of `AnswersOnly`
        the loss mask leaves out everything but answers.
      tokenizer: the model's tokenizer; may be None for token ids.
      batch_size: B, sequences per batch.
      length: T, tokens per sequence.
      packing: how documents become sequences. "concatenate" cuts the stream of documents every T
        tokens; "concatenate_whole" also starts every sequence with a document; "first_fit"
        separates the documents of a sequence by segment ids.
      vocab_size: V, to check token ids against; None for no check.
      seed: seed of the order of the documents, which is new in each epoch; None keeps the order of
        the data.
      repeat: whether to start over at the end; otherwise an incomplete batch is dropped.

    Raises:
      ConfigError: an option is malformed.
      DataError: the data cannot be used; the message names file and line if there are any.
    """
    import grain

    from dms_jax.data import packing as packings

    batch_size, length = check("batch_size", batch_size, Count), check("length", length, Count)
    seed = check("seed", seed, int | None)
    check("packing", packing, Packing)
    source = encodable(as_source(data), tokenizer, vocab_size)
    documents = Tokens(source, tokenizer, vocab_size)
    dataset = grain.MapDataset.source(documents)
    dataset = dataset if seed is None else dataset.seed(seed % 2**32).shuffle()
    dataset = dataset.repeat() if repeat else dataset
    # The only document with tokens may come first in one epoch and last in the next.
    stream = packings.NonEmpty(
        dataset.to_iter_dataset(
            grain.ReadOptions(num_threads=WORKERS, prefetch_buffer_size=8 * WORKERS)
        ),
        max_empty=2 * len(documents),
    )
    if packing == "first_fit":
        packed = packings.first_fit(
            stream, documents, length=length, bins=_OPEN_SEQUENCES, seed=seed or 0
        )
    else:
        packed = packings.Concatenate(
            stream, documents, length=length, carry=packing == "concatenate"
        )
    batched = packed.batch(batch_size, drop_remainder=True)
    return Batches(
        iter(
            grain.experimental.ThreadPrefetchIterDataset(
                batched, prefetch_buffer_size=_PACKED_AHEAD
            )
        )
    )
