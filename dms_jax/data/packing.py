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

from dms_jax.data.tokenization import Tokenized, TokenizedDocuments
from dms_jax.errors import DataError

_NAMES = ("tokens", "loss_mask")


def pack(
    stream: grain.IterDataset,
    documents: TokenizedDocuments,
    *,
    packing: str,
    length: int,
    bins: int,
    seed: int,
) -> grain.IterDataset:
    """Returns the sequences of a stream, as `{"tokens", "loss_mask"}`, each [T].

    Args:
      stream: non-empty documents; long texts as their first chunk.
      documents: source of the further chunks of long texts.
      packing: "concatenate", "concatenate_whole", or "first_fit", which adds "segment_ids", [T].
      length: T, tokens per sequence.
      bins: number of sequences that first fit keeps open.
      seed: seed of the order in which first fit returns sequences.
    """
    if packing == "first_fit":
        return _first_fit(stream, documents, length, bins, seed)
    return _Concatenate(stream, documents, length, carry=packing == "concatenate")


class _Concatenate(grain.IterDataset):
    """Concatenates and cuts documents; with `carry` a document's rest starts the next sequence."""

    def __init__(
        self, parent: grain.IterDataset, documents: TokenizedDocuments, length: int, *, carry: bool
    ):
        super().__init__(parent)
        self._options = (documents, length, carry)

    def __iter__(self) -> grain.DatasetIterator:
        return _ConcatenateIterator(iter(self._parent), *self._options)


class _ConcatenateIterator(grain.DatasetIterator):
    """The state: the parent's before the current document, the chunk, the offset in the chunk.

    The rest of a document is not stored; it is tokenized again.
    """

    def __init__(
        self,
        parent: grain.DatasetIterator,
        documents: TokenizedDocuments,
        length: int,
        carry: bool,
    ):
        super().__init__(parent)
        self._documents, self._length, self._carry = documents, length, carry
        self._before: dict[str, Any] = parent.get_state()
        self._chunk: Tokenized | None = None
        self._start = self._offset = 0

    def __next__(self) -> dict[str, np.ndarray]:
        parts, missing = [], self._length
        while missing:
            chunk = self._current()
            part = {name: chunk[name][self._offset : self._offset + missing] for name in _NAMES}
            self._offset += len(part["tokens"])
            missing -= len(part["tokens"])
            parts.append(part)
        if not self._carry:
            self._end_document()
        return {name: np.concatenate([part[name] for part in parts]) for name in _NAMES}

    def _current(self) -> Tokenized:
        """Returns the chunk with the next token."""
        while self._chunk is None or self._offset == len(self._chunk["tokens"]):
            if self._chunk is not None and self._chunk["next"] >= 0:
                self._start, self._offset = int(self._chunk["next"]), 0
                self._chunk = self._documents.chunk(int(self._chunk["index"]), self._start)
            else:
                self._end_document()
                self._chunk = next(self._parent)
        return self._chunk

    def _end_document(self) -> None:
        self._before = self._parent.get_state()
        self._chunk, self._start, self._offset = None, 0, 0

    def get_state(self) -> dict[str, Any]:
        return {"parent": self._before, "start": self._start, "offset": self._offset}

    def set_state(self, state: dict[str, Any]) -> None:
        self._parent.set_state(state["parent"])
        self._end_document()
        if state["start"] or state["offset"]:
            chunk = next(self._parent)
            index, self._start, self._offset = int(chunk["index"]), state["start"], state["offset"]
            if self._start:
                chunk = self._documents.chunk(index, self._start)
            if self._offset > len(chunk["tokens"]):  # otherwise no sequence would ever be full
                raise DataError(
                    f"Document {index} ends before the place up to which it was read when this "
                    "state was taken: these are other data. Give the run's data to resume it."
                )
            self._chunk = chunk


def _first_fit(
    parent: grain.IterDataset, documents: TokenizedDocuments, length: int, bins: int, seed: int
) -> grain.IterDataset:
    """Packs whole documents; a document is truncated to T tokens."""

    def whole(document: Tokenized) -> dict[str, np.ndarray]:
        parts, count = [document], len(document["tokens"])
        while count < length and parts[-1]["next"] >= 0:
            parts.append(documents.chunk(int(document["index"]), int(parts[-1]["next"])))
            count += len(parts[-1]["tokens"])
        return {
            name: np.concatenate([part[name] for part in parts])[:length].astype(np.int32)
            for name in _NAMES
        }

    packed = grain.experimental.FirstFitPackIterDataset(
        parent.map(whole),
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
