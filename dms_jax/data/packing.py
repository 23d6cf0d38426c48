"""Packing: documents of any length to sequences of exactly T tokens, as Grain datasets.

**Concatenate**, as the code of the DMS paper does: documents are joined and cut every T tokens;
attention crosses their borders and positions continue. With `carry=False` the rest of a document is
dropped when its sequence is full, so that every sequence begins with a document.

    # T=4, documents abcdef, gh   In: abcdef gh   Out: abcd, efgh    (carry)   abcd, gh..  (not)

**First fit**, if attention must stay within documents: each document goes as a whole into the first
of a few open sequences that has room; segment ids (1, 2, ...; 0 for padding) separate them.

    # T=4, documents abc, de, f   Out: abcf [1 1 1 2], de.. [1 1 0 0]

This module imports Grain; import it only where it is used.
"""

from typing import Any

import grain
import numpy as np

from dms_jax.data.tokens import Tokenized, Tokens
from dms_jax.errors import DataError

_NAMES = ("tokens", "loss_mask")


class NonEmpty(grain.IterDataset):
    """The documents that are not empty.

    Args:
      parent: documents, as `{"tokens", "loss_mask"}`.
      max_empty: number of consecutive empty documents after which the data counts as empty.
    """

    def __init__(self, parent: grain.IterDataset, *, max_empty: int):
        super().__init__(parent)
        self._max_empty = max_empty

    def __iter__(self) -> grain.DatasetIterator:
        return _NonEmptyIterator(iter(self._parent), self._max_empty)


class _NonEmptyIterator(grain.DatasetIterator):
    def __init__(self, parent: grain.DatasetIterator, max_empty: int):
        super().__init__(parent)
        self._max_empty = max_empty

    def __next__(self) -> dict[str, np.ndarray]:
        for _ in range(self._max_empty + 1):
            document = next(self._parent)
            if len(document["tokens"]):
                return document
        raise DataError("The documents hold no token to train on.")

    def get_state(self) -> dict[str, Any]:
        return self._parent.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        self._parent.set_state(state)


class Concatenate(grain.IterDataset):
    """Joins documents of any length and cuts them into sequences.

    Args:
      parent: documents, as `Tokens` gives them.
      documents: where further pieces of long texts come from.
      length: T, tokens per sequence.
      carry: whether the rest of a document goes into the next sequence.
    """

    def __init__(self, parent: grain.IterDataset, documents: Tokens, *, length: int, carry: bool):
        super().__init__(parent)
        self._options = (documents, length, carry)

    def __iter__(self) -> grain.DatasetIterator:
        return _ConcatenateIterator(iter(self._parent), *self._options)


class _ConcatenateIterator(grain.DatasetIterator):
    """Its state is that before the current document, the piece of it, and the place in the piece.

    What is left of a document is not in the state; it is tokenized again.
    """

    def __init__(self, parent: grain.DatasetIterator, documents: Tokens, length: int, carry: bool):
        super().__init__(parent)
        self._documents, self._length, self._carry = documents, length, carry
        self._before: dict[str, Any] = parent.get_state()
        self._piece: Tokenized | None = None
        self._start = self._offset = 0

    def __next__(self) -> dict[str, np.ndarray]:
        parts, missing = [], self._length
        while missing:
            piece = self._current()
            part = {name: piece[name][self._offset : self._offset + missing] for name in _NAMES}
            self._offset += len(part["tokens"])
            missing -= len(part["tokens"])
            parts.append(part)
        if not self._carry:
            self._end_document()
        return {name: np.concatenate([part[name] for part in parts]) for name in _NAMES}

    def _current(self) -> Tokenized:
        """Returns the piece that the next token is from."""
        while self._piece is None or self._offset == len(self._piece["tokens"]):
            if self._piece is not None and self._piece["next"] >= 0:
                self._start, self._offset = int(self._piece["next"]), 0
                self._piece = self._documents.rest(int(self._piece["index"]), self._start)
            else:
                self._end_document()
                self._piece = next(self._parent)
        return self._piece

    def _end_document(self) -> None:
        self._before = self._parent.get_state()
        self._piece, self._start, self._offset = None, 0, 0

    def get_state(self) -> dict[str, Any]:
        return {"parent": self._before, "start": self._start, "offset": self._offset}

    def set_state(self, state: dict[str, Any]) -> None:
        self._parent.set_state(state["parent"])
        self._end_document()
        if state["start"] or state["offset"]:
            piece = next(self._parent)
            index, self._start, self._offset = int(piece["index"]), state["start"], state["offset"]
            if self._start:
                piece = self._documents.rest(index, self._start)
            if self._offset > len(piece["tokens"]):  # no sequence would ever be full
                raise DataError(
                    f"Document {index} ends before the place up to which it was read when this "
                    "state was taken: these are other data. Give those of the run to resume it."
                )
            self._piece = piece


def first_fit(
    parent: grain.IterDataset, documents: Tokens, *, length: int, bins: int, seed: int
) -> grain.IterDataset:
    """Packs whole documents into `{"tokens", "segment_ids", "loss_mask"}`, each [T].

    Args:
      parent: documents, as `Tokens` gives them; what exceeds T tokens is dropped.
      documents: where further pieces of long texts come from.
      length: T, tokens per sequence.
      bins: sequences that are open at a time.
      seed: seed of the order in which sequences are returned.
    """

    def whole(document: Tokenized) -> dict[str, np.ndarray]:
        parts, count = [document], len(document["tokens"])
        while count < length and parts[-1]["next"] >= 0:
            parts.append(documents.rest(int(document["index"]), int(parts[-1]["next"])))
            count += len(parts[-1]["tokens"])
        return {
            name: np.concatenate([part[name] for part in parts])[:length].astype(np.int32)
            for name in _NAMES
        }

    packed = grain.experimental.FirstFitPackIterDataset(
        parent.map(whole),
        length_struct={"tokens": length, "loss_mask": length},
        num_packing_bins=bins,
        seed=seed,
    )
    return packed.map(_finish)


def _finish(packed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    segment_ids = np.asarray(packed["tokens_segment_ids"], np.int32)
    return {
        "tokens": np.asarray(packed["tokens"], np.int32),
        "segment_ids": segment_ids,
        "loss_mask": (segment_ids > 0) & np.asarray(packed["loss_mask"], bool),
    }
