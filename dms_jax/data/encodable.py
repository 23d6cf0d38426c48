"""Documents that a model can be trained on: the others are counted and left out, up to a share.

A record may be whole and its document useless all the same: the chat template refuses the
conversation, or a token is outside the vocabulary. Where a share of them may be malformed
(`Source.malformed`), all documents are looked at before the first step: every process leaves out
the same, and so does a run that goes on later. Templates are rendered for that; texts are tokenized
only where the tokenizer has more tokens than the model.
"""

import array
import warnings
from typing import Any

import numpy as np

from dms_jax.data.documents import AnswersOnly, Document, Source
from dms_jax.data.encoding import check_document, encode_answers, encode_document
from dms_jax.errors import DataError


class _Kept(Source):
    """Some documents of a source."""

    def __init__(self, source: Source, kept: array.array):
        self._source, self._kept = source, kept

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: int) -> Document:
        return self._source[self._kept[index]]

    def where(self, index: int) -> str:
        """Returns the origin of a document, for messages."""
        return self._source.where(self._kept[index])


def encodable(source: Source, tokenizer: Any, vocab_size: int | None) -> Source:
    """Returns the documents of a source that can be encoded; all of them if none may be left out.

    Args:
      source: the documents; of `AnswersOnly` they must have answers that can be told apart.
      tokenizer: the model's tokenizer; may be None for token ids.
      vocab_size: V, to check token ids against; None for no check.

    Raises:
      DataError: more than the share of the source are left out, or all.
    """
    if source.malformed == 0:
        return source
    answers = isinstance(source, AnswersOnly)
    kept, first = array.array("q"), None
    for index in range(len(source)):
        try:
            _check(source[index], tokenizer, vocab_size, answers=answers)
        except DataError as error:
            # Where a document is takes a while to say, and it is said of one.
            first = first or f"{source.where(index)}: {error}"
        else:
            kept.append(index)
    wrong, total = len(source) - len(kept), len(source) + source.refused
    if not wrong:
        return source
    told = f"{wrong} of {total} documents cannot be encoded"
    if source.refused:
        told = f"{told}, beside {source.refused} that are malformed"
    if wrong + source.refused > source.malformed * total:
        raise DataError(f"{told}, more than a share of {source.malformed:g}. The first: {first}")
    if not kept:
        raise DataError(f"{told}, and none is left. The first: {first}")
    warnings.warn(f"{told}. They are left out. The first: {first}", stacklevel=3)
    return AnswersOnly(_Kept(source, kept)) if answers else _Kept(source, kept)


def check_vocabulary(tokens: np.ndarray, vocab_size: int | None) -> None:
    """Raises DataError if a token id lies outside the vocabulary."""
    if vocab_size is None or not tokens.size:
        return
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        raise DataError(f"token ids must lie in 0 ... {vocab_size - 1}, got {low} ... {high}.")


def _check(document: Any, tokenizer: Any, vocab_size: int | None, *, answers: bool) -> None:
    """Raises DataError if a document cannot be encoded."""
    tokens = check_document(document, tokenizer, answers=answers)
    if tokens is None and vocab_size is not None and not _fits(tokenizer, vocab_size):
        encoded = encode_answers(document, tokenizer)[0] if answers else None
        tokens = encode_document(document, tokenizer) if encoded is None else encoded
    if tokens is not None:
        check_vocabulary(tokens, vocab_size)


def _fits(tokenizer: Any, vocab_size: int) -> bool:
    """Whether the model has every token of a tokenizer."""
    size = getattr(tokenizer, "vocab_size", None)
    return size is not None and size <= vocab_size
