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

from dms_jax.errors import DataError


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
      parent: documents, as `{"tokens", "loss_mask"}`.
      length: T, tokens per sequence.
      carry: whether the rest of a document goes into the next sequence.
    """

    def __init__(self, parent: grain.IterDataset, *, length: int, carry: bool):
        super().__init__(parent)
        self._options = (length, carry)

    def __iter__(self) -> grain.DatasetIterator:
        return _ConcatenateIterator(iter(self._parent), *self._options)


class _ConcatenateIterator(grain.DatasetIterator):
    def __init__(self, parent: grain.DatasetIterator, length: int, carry: bool):
        super().__init__(parent)
        self._length, self._carry = length, carry
        self._rest = {"tokens": np.zeros(0, np.int32), "loss_mask": np.zeros(0, bool)}

    def __next__(self) -> dict[str, np.ndarray]:
        parts, total = [self._rest], len(self._rest["tokens"])
        while total < self._length:
            document = next(self._parent)
            parts.append(document)
            total += len(document["tokens"])
        whole = {name: np.concatenate([part[name] for part in parts]) for name in self._rest}
        kept = self._length if self._carry else total
        self._rest = {name: values[kept:] for name, values in whole.items()}
        return {name: values[: self._length] for name, values in whole.items()}

    def get_state(self) -> dict[str, Any]:
        rest = {name: values.tolist() for name, values in self._rest.items()}
        return {"parent": self._parent.get_state(), "rest": rest}

    def set_state(self, state: dict[str, Any]) -> None:
        self._parent.set_state(state["parent"])
        self._rest = {
            name: np.asarray(state["rest"][name], values.dtype)
            for name, values in self._rest.items()
        }


def first_fit(parent: grain.IterDataset, *, length: int, bins: int, seed: int) -> grain.IterDataset:
    """Packs whole documents into `{"tokens", "segment_ids", "loss_mask"}`, each [T].

    Args:
      parent: documents, as `{"tokens", "loss_mask"}`; what exceeds T tokens is dropped.
      length: T, tokens per sequence.
      bins: sequences that are open at a time.
      seed: seed of the order in which sequences are returned.
    """
    documents = parent.map(
        lambda document: {
            name: values[:length].astype(np.int32) for name, values in document.items()
        }
    )
    packed = grain.experimental.FirstFitPackIterDataset(
        documents,
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
