"""Documents as token ids, long texts a piece at a time.

    {"tokens": int32 [n], "loss_mask": bool [n], "index": [], "next": []}

`next` is where the next piece of the text starts, -1 if there is none: what packs the documents
asks for it (`rest`) once it needs it.
"""

from typing import Any

import numpy as np

from dms_jax.data.documents import AnswersOnly, Source
from dms_jax.data.encodable import check_vocabulary
from dms_jax.data.encoding import encode_answers, encode_document, encode_piece
from dms_jax.errors import DataError

Tokenized = dict[str, np.ndarray]


class Tokens:
    """The data source for Grain: documents as token ids, and whether each counts in the loss."""

    def __init__(self, source: Source, tokenizer: Any, vocab_size: int | None):
        self._source, self._tokenizer, self._vocab_size = source, tokenizer, vocab_size
        # Pieces of one text are asked for one after the other.
        self._text: tuple[int, Any] = (-1, None)

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Tokenized:
        return self._encoded(index, self._source[index], 0)

    def rest(self, index: int, start: int) -> Tokenized:
        """Returns the piece of a text that starts at `start`."""
        if self._text[0] != index:
            self._text = (index, self._source[index])
        return self._encoded(index, self._text[1], start)

    def _encoded(self, index: int, document: Any, start: int) -> Tokenized:
        after = -1
        try:
            if isinstance(self._source, AnswersOnly):
                tokens, counts = encode_answers(document, self._tokenizer)
            else:
                if isinstance(document, str):
                    tokens, after = encode_piece(document, start, self._tokenizer)
                else:
                    tokens = encode_document(document, self._tokenizer)
                counts = np.ones(tokens.shape, bool)
            check_vocabulary(tokens, self._vocab_size)
        except DataError as error:
            raise DataError(f"{self._source.where(index)}: {error}") from error
        return {
            "tokens": tokens,
            "loss_mask": counts,
            "index": np.asarray(index),
            "next": np.asarray(after),
        }
