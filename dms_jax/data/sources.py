"""Documents to train on: text files, JSON lines, strings, token arrays.

A source is a random-access sequence of documents. A document is a string, a conversation (a list of
`{"role": ..., "content": ...}`), a prompt with its response, or an array of token ids. Files are
indexed once, without parsing, and memory-mapped, so that a source of many gigabytes takes only the
memory of its index.
"""

import abc
import array
import bisect
import dataclasses
import json
import mmap
import pathlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dms_jax.checks import Share, check
from dms_jax.errors import DataError

SEPARATOR = "<|endoftext|>"


@dataclasses.dataclass(frozen=True)
class Exchange:
    """A prompt and the response to it.

    Attributes:
      prompt: a text, a list of chat messages, or token ids.
      response: a text; token ids if the prompt is token ids.
    """

    prompt: str | Sequence[Any] | np.ndarray
    response: str | Sequence[int] | np.ndarray


Document = str | Sequence[Mapping[str, Any] | int] | np.ndarray | Exchange
Paths = str | pathlib.Path | Sequence[str | pathlib.Path]


class Source(abc.ABC):
    """A sequence of documents that knows where each of them is from."""

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def __getitem__(self, index: int) -> Document: ...

    def where(self, index: int) -> str:
        """Returns the origin of a document, for messages."""
        return f"document {index}"


class Documents(Source):
    """Documents in memory: strings, conversations or token ids."""

    def __init__(self, documents: Sequence[Any] | np.ndarray):
        self._documents = documents

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, index: int) -> Document:
        return self._documents[index]


class AnswersOnly(Source):
    """The documents of a source, of which only answers count in the loss."""

    def __init__(self, source: Source):
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Document:
        return self._source[index]

    def where(self, index: int) -> str:
        """Returns the origin of a document, for messages."""
        return self._source.where(index)


class _Files(Source):
    """Documents that are spans of files."""

    def __init__(self, paths: Paths):
        paths = [paths] if isinstance(paths, str | pathlib.Path) else list(paths)
        self._paths = [pathlib.Path(path) for path in paths]
        self._bytes: list[mmap.mmap] = []
        self._starts, self._ends = array.array("q"), array.array("q")
        self._first: list[int] = []  # index of the first document of each file
        for path in self._paths:
            self._first.append(len(self._starts))
            try:
                with path.open("rb") as file:
                    content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError as error:
                raise DataError(f"{path} is empty.") from error
            except OSError as error:
                raise DataError(f"{path} cannot be read: {error.strerror}.") from error
            self._bytes.append(content)
            for start, end in self._spans(content):
                self._starts.append(start)
                self._ends.append(end)
            if len(self._starts) == self._first[-1]:
                raise DataError(f"{path} holds no document.")
        if not self._paths:
            raise DataError("No file was given.")

    @staticmethod
    @abc.abstractmethod
    def _spans(content: mmap.mmap) -> Iterator[tuple[int, int]]: ...

    def __len__(self) -> int:
        return len(self._starts)

    def _file(self, index: int) -> int:
        return bisect.bisect_right(self._first, index) - 1

    def where(self, index: int) -> str:
        """Returns the file and line of a document, for messages."""
        file = self._file(index)
        before = self._bytes[file][: self._starts[index]]
        return f"{self._paths[file]}, line {before.count(b'\n') + 1}"

    def _text(self, index: int) -> str:
        span = self._bytes[self._file(index)][self._starts[index] : self._ends[index]]
        try:
            return span.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"{self.where(index)}: this is not UTF-8 text: {error}") from error


def _split(content: mmap.mmap, separator: bytes) -> Iterator[tuple[int, int]]:
    """Yields the spans between separators, without surrounding white space and empty ones."""
    start, size = 0, len(content)
    while start < size:
        end = content.find(separator, start)
        end = size if end < 0 else end
        span = content[start:end]
        if span.strip():
            left = start + len(span) - len(span.lstrip())
            yield left, left + len(span.strip())
        start = end + len(separator)


class TextFiles(_Files):
    """Text files whose documents are separated by `<|endoftext|>`.

    Args:
      paths: path of one file, or several.

    Raises:
      DataError: a file is missing or empty or, once it is read, not UTF-8.
    """

    @staticmethod
    def _spans(content: mmap.mmap) -> Iterator[tuple[int, int]]:
        return _split(content, SEPARATOR.encode())

    def __getitem__(self, index: int) -> str:
        return self._text(index)


class JsonLines(_Files):
    """Files of one JSON object per line, of which a field is a text or a list of chat messages.

    Args:
      paths: path of one file, or several.
      field: name of the field; None for "messages" if there is one, "prompt" with "response" if
        there are both, and "text" otherwise.
      malformed: largest share of the lines that may be left out because they are malformed. Above
        0 every line is parsed at once, and what is left out is counted in a warning; at 0 a
        malformed line is an error when it is read.

    Raises:
      ConfigError: `malformed` is not a share.
      DataError: a file is missing or empty, or too many lines are malformed; or, once a line is
        read, it holds something else.
    """

    def __init__(self, paths: Paths, field: str | None = None, *, malformed: float = 0.0):
        self._field = field
        malformed = check("JsonLines: malformed", malformed, Share)
        super().__init__(paths)
        if malformed > 0:
            self._leave_out(malformed)

    def _leave_out(self, share: float) -> None:
        wrong: dict[int, DataError] = {}
        for index in range(len(self)):
            try:
                self[index]
            except DataError as error:
                wrong[index] = error
        if not wrong:
            return
        first = next(iter(wrong.values()))
        told = f"{len(wrong)} of {len(self)} lines are malformed"
        if len(wrong) > share * len(self):
            raise DataError(f"{told}, more than a share of {share:g}. The first: {first}")
        warnings.warn(f"{told} and left out. The first: {first}", stacklevel=3)
        kept = [index for index in range(len(self)) if index not in wrong]
        self._first = [bisect.bisect_left(kept, first) for first in self._first]
        self._starts = array.array("q", (self._starts[index] for index in kept))
        self._ends = array.array("q", (self._ends[index] for index in kept))

    @staticmethod
    def _spans(content: mmap.mmap) -> Iterator[tuple[int, int]]:
        return _split(content, b"\n")

    def __getitem__(self, index: int) -> str | list[dict[str, Any]] | Exchange:
        text = self._text(index)
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{self.where(index)}: this is not JSON: {error}") from error
        if not isinstance(record, dict):
            raise DataError(
                f"{self.where(index)}: expected a JSON object, got a {type(record).__name__}."
            )
        field = self._field
        if field is None and "messages" not in record and {"prompt", "response"} <= record.keys():
            return self._exchange(index, record)
        if field is None:
            field = "messages" if "messages" in record else "text"
        if field not in record:
            found = ", ".join(sorted(record)) or "none"
            raise DataError(f"{self.where(index)}: there is no field {field!r}; fields: {found}.")
        value = record[field]
        if isinstance(value, str):
            return value
        if _is_chat(value):
            return value
        raise DataError(
            f"{self.where(index)}: field {field!r} must be a text or a list of messages "
            '({"role": ..., "content": ...}).'
        )

    def _exchange(self, index: int, record: dict[str, Any]) -> Exchange:
        prompt, response = record["prompt"], record["response"]
        if not (isinstance(prompt, str) or _is_chat(prompt)) or not isinstance(response, str):
            raise DataError(
                f"{self.where(index)}: 'prompt' must be a text or a list of messages, and "
                "'response' a text."
            )
        return Exchange(prompt, response)


def _is_chat(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(turn, dict) and "role" in turn for turn in value)
    )


def as_source(data: Any) -> Source:
    """Returns the source of any kind of data that `train` accepts.

    Args:
      data: a source; one path or a list of `pathlib.Path` (`.jsonl` and `.json` are JSON lines,
        anything else is text); a list of strings, of conversations or of token ids; or an [N, T]
        array of token ids.

    Raises:
      DataError: the data is none of these, or empty.
    """
    if isinstance(data, Source):
        source = data
    elif isinstance(data, str | pathlib.Path):
        source = _open([pathlib.Path(data)])
    elif isinstance(data, Sequence | np.ndarray):
        if len(data) and all(isinstance(item, pathlib.Path) for item in data):
            source = _open(list(data))
        elif len(data) and all(isinstance(item, str) and _is_file_name(item) for item in data):
            raise DataError(
                f"{data[0]!r} is the name of a file, and a list of strings is a list of texts. "
                "Give the files as pathlib.Path."
            )
        else:
            source = Documents(data)
    else:
        raise DataError(
            f"Cannot train on a {type(data).__name__}. Give a path, a list of texts or "
            "conversations, token ids, or a source of dms_jax.data."
        )
    if not len(source):
        raise DataError("There is no document to train on.")
    return source


def _is_file_name(text: str) -> bool:
    """Whether a text is one line that ends like the name of a data file."""
    return "\n" not in text and text.endswith((".jsonl", ".json", ".txt"))


def _open(paths: list[pathlib.Path]) -> Source:
    lines = [path.suffix in (".jsonl", ".json") for path in paths]
    if any(lines) and not all(lines):
        raise DataError("Text files and JSON lines cannot be mixed in one list.")
    return JsonLines(paths) if all(lines) else TextFiles(paths)
