"""Documents, and the interface of sources of documents."""

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dms_jax.checks import Share, check


@dataclasses.dataclass(frozen=True)
class Exchange:
    """A prompt and its response.

    Attributes:
      prompt: a text, a list of chat messages, or token ids.
      response: a text; token ids if the prompt is token ids.
    """

    prompt: str | Sequence[Any] | np.ndarray
    response: str | Sequence[int] | np.ndarray


Document = str | Sequence[Mapping[str, Any] | int] | np.ndarray | Exchange


class Source(abc.ABC):
    """A sequence of documents with the origin of each.

    Attributes:
      malformed: largest share of malformed documents that may be skipped.
      refused: number of malformed documents that were skipped.
    """

    malformed: float = 0.0
    refused: int = 0

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def __getitem__(self, index: int) -> Document: ...

    def where(self, index: int) -> str:
        """Returns the origin of a document, for messages."""
        return f"document {index}"


class Documents(Source):
    """Documents in memory: strings, conversations or token ids.

    Args:
      documents: the documents.
      malformed: largest share of malformed documents that may be skipped; at 0 a malformed document
        is an error when it is read.

    Raises:
      ConfigError: `malformed` is not a share.
    """

    def __init__(self, documents: Sequence[Any] | np.ndarray, malformed: float = 0.0):
        self._documents = documents
        self.malformed = check("malformed", malformed, Share)

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, index: int) -> Document:
        return self._documents[index]
