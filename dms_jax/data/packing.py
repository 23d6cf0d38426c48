"""Packing: turns streams of documents of any length into sequences of exactly T tokens.

**Concatenate**, as the code of the DMS paper does: documents are joined and cut every T tokens;
attention crosses their borders and positions continue. "concatenate_whole" drops the rest of a
document when its sequence is full, so every sequence begins with a document.

    # T=4, documents abcdef, gh   concatenate: abcd, efgh   concatenate_whole: abcd, gh..

**First fit**, if attention must stay within documents: each document goes whole into the first of a
few open sequences with room; segment ids (1, 2, ...; 0 for padding) separate documents.

    # T=4, documents abc, de, f   first_fit: abcf [1 1 1 2], de.. [1 1 0 0]

This module imports Grain; import it only where it is used.
"""

from typing import Any

import grain
import numpy as np

from dms_jax.data.tokenization import Tokenized
from dms_jax.errors import DataError

_NAMES = ("tokens", "loss_mask")


def pack(
    stream: grain.IterDataset,
    *,
    packing: str,
    length: int,
    bins: int,
    seed: int,
) -> grain.IterDataset:
    """Returns the sequences of a stream, as `{"tokens", "loss_mask"}`, each [T].

    Args:
      stream: non-empty documents.
      packing: "concatenate", "concatenate_whole", or "first_fit", which adds "segment_ids", [T].
      length: T, tokens per sequence.
      bins: number of sequences that first fit keeps open.
      seed: seed of the order in which first fit returns sequences.
    """
    if packing == "first_fit":
        return _first_fit(stream, length, bins, seed)
    return _Concatenate(stream, length, carry=packing == "concatenate")


class _Concatenate(grain.IterDataset):
    """Concatenates and cuts documents; with `carry` a document's rest starts the next sequence."""

    def __init__(self, parent: grain.IterDataset, length: int, *, carry: bool):
        super().__init__(parent)
        self._options = (length, carry)

    def __iter__(self) -> grain.DatasetIterator:
        return _ConcatenateIterator(iter(self._parent), *self._options)


class _ConcatenateIterator(grain.DatasetIterator):
    """The state: the parent's before the current document, and the offset in the document.

    The rest of a document is not stored; it is tokenized again.
    """

    def __init__(self, parent: grain.DatasetIterator, length: int, carry: bool):
        super().__init__(parent)
        self._length, self._carry = length, carry
        self._end_document()

    def __next__(self) -> dict[str, np.ndarray]:
        parts, missing = [], self._length
        while missing:
            document = self._current()
            end = self._offset + missing
            part = {name: document[name][self._offset : end] for name in _NAMES}
            self._offset += len(part["tokens"])
            missing -= len(part["tokens"])
            parts.append(part)
        if not self._carry:
            self._end_document()
        return {name: np.concatenate([part[name] for part in parts]) for name in _NAMES}

    def _current(self) -> Tokenized:
        """Returns the document with the next token."""
        document = self._document
        while document is None or self._offset == len(document["tokens"]):
            self._end_document()
            document = self._document = next(self._parent)
        return document

    def _end_document(self) -> None:
        self._before: dict[str, Any] = self._parent.get_state()
        self._document: Tokenized | None = None
        self._offset = 0

    def get_state(self) -> dict[str, Any]:
        return {"parent": self._before, "offset": self._offset}

    def set_state(self, state: dict[str, Any]) -> None:
        self._parent.set_state(state["parent"])
        self._end_document()
        if state["offset"]:
            document, self._offset = next(self._parent), state["offset"]
            if self._offset > len(document["tokens"]):  # no sequence would ever be full
                raise DataError(
                    "A document ends before the place up to which it was read when this state was "
                    "taken: these are other data. Give the run's data to resume it."
                )
            self._document = document


def _first_fit(parent: grain.IterDataset, length: int, bins: int, seed: int) -> grain.IterDataset:
    """Packs whole documents; a document is truncated to T tokens."""

    def truncated(document: Tokenized) -> dict[str, np.ndarray]:
        return {name: document[name][:length].astype(np.int32) for name in _NAMES}

    packed = grain.experimental.FirstFitPackIterDataset(
        parent.map(truncated),
        length_struct={"tokens": length, "loss_mask": length},
        num_packing_bins=bins,
        seed=seed % 2**64,  # NumPy refuses negative ones
    )
    return packed.map(_as_sequence)


def _as_sequence(packed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    segment_ids = np.asarray(packed["tokens_segment_ids"], np.int32)
    return {
        "tokens": np.asarray(packed["tokens"], np.int32),
        "segment_ids": segment_ids,
        "loss_mask": (segment_ids > 0) & np.asarray(packed["loss_mask"], bool),
    }
