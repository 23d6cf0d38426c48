"""Training documents: text files, JSON lines, tables, strings, token arrays.

A source is a random-access sequence of documents. A document is a string, a conversation (a list of
`{"role": ..., "content": ...}`), a prompt with its response, or an array of token ids. Files are
indexed once, without parsing, and memory-mapped, so a source of many gigabytes takes only the
memory of its index (`files`).

A run must be resumed with the same data: their `fingerprint` is one of its settings.
"""

import abc
import array
import codecs
import dataclasses
import hashlib
import json
import mmap
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dms_jax.data.documents import Documents, Source
from dms_jax.data.files import map_text, read_json
from dms_jax.data.records import Fields, Records
from dms_jax.data.tables import Tables, is_table
from dms_jax.errors import DataError

SEPARATOR = "<|endoftext|>"
_MARK = codecs.BOM_UTF8
_COUNTED_AT_A_TIME = 2**24  # bytes to search for line ends at a time
_SAMPLED = 1024  # documents that the fingerprint reads: the first, the last, evenly spaced ones
_LONGEST_PART = 2**18  # bytes of a document of a text file, so that long texts are shuffled too
Paths = str | pathlib.Path | Sequence[str | pathlib.Path]


class _Files(Records):
    """Documents that are spans of files."""

    def __init__(self, paths: Paths, fields: Fields | None = None):
        super().__init__(fields)
        paths = [paths] if isinstance(paths, str | pathlib.Path) else list(paths)
        self._paths = [pathlib.Path(path) for path in paths]
        self._bytes: list[mmap.mmap] = []
        self._starts, self._ends = array.array("q"), array.array("q")
        for path in self._paths:
            self._first.append(len(self._starts))
            content = map_text(path)
            self._bytes.append(content)
            for start, end in self._spans(content):
                self._starts.append(start)
                self._ends.append(end)
            if len(self._starts) == self._first[-1]:
                raise DataError(f"{path} contains no documents.")
        if not self._paths:
            raise DataError("No file was given.")
        self.read_all()

    @abc.abstractmethod
    def _spans(self, content: mmap.mmap) -> Iterator[tuple[int, int]]: ...

    def count(self) -> int:
        """Returns the number of spans."""
        return len(self._starts)

    def place(self, place: int) -> str:
        """Returns the file and line of a span, for messages."""
        file, end = self._file(place), self._starts[place]
        content, before = self._bytes[file], 0
        for start in range(0, end, _COUNTED_AT_A_TIME):
            before += content[start : min(start + _COUNTED_AT_A_TIME, end)].count(b"\n")
        return f"{self._paths[file]}, line {before + 1}"

    def _text(self, place: int) -> str:
        span = self._bytes[self._file(place)][self._starts[place] : self._ends[place]]
        try:
            return span.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"this is not UTF-8 text: {error}") from error


def _split(content: mmap.mmap, separator: bytes) -> Iterator[tuple[int, int]]:
    """Yields the non-empty spans between separators, without surrounding white space.

    A byte-order mark at the start of the file, as PowerShell writes it, is skipped.
    """
    start, size = len(_MARK) if content[: len(_MARK)] == _MARK else 0, len(content)
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
      fields: which documents to skip (`malformed`, `longest`).
      most: bytes of the longest document; longer ones are divided at line breaks or spaces. None
        for no limit.

    Raises:
      DataError: a file is missing or empty; when a document is read, it is not UTF-8.
    """

    def __init__(self, paths: Paths, fields: Fields | None = None, *, most: int | None = None):
        self._most = most
        super().__init__(paths, fields)

    def _spans(self, content: mmap.mmap) -> Iterator[tuple[int, int]]:
        for start, end in _split(content, SEPARATOR.encode()):
            while self._most is not None and end - start > self._most:
                cut = _cut(content, start, start + self._most)
                yield start, cut
                start = cut
            yield start, end

    def record(self, place: int) -> dict[str, str]:
        """Returns a document as a record of one field."""
        return {self._fields.field or "text": self._text(place)}


def _cut(content: mmap.mmap, start: int, end: int) -> int:
    """Returns where to divide a text that is longer than [start, end).

    Behind the last line or word of the second half or, if there is none, of the first; otherwise
    between two characters.
    """
    for first in ((start + end) // 2, start):
        for mark in (b"\n", b" "):
            if (place := content.rfind(mark, first, end)) >= 0:
                return place + 1
    within = next((n for n in range(3) if content[end - n] & 0xC0 != 0x80), 0)
    return end - within  # before a character of UTF-8, not in its middle


class JsonLines(_Files):
    """Files of one JSON object per line, in the forms of `dms_jax.data.records`.

    Args:
      paths: path of one file, or several.
      fields: the fields of a record that make a document, and the records to skip.

    Raises:
      DataError: a file is missing or empty, or too many lines are malformed; when a line is read,
        it is malformed.
    """

    def _spans(self, content: mmap.mmap) -> Iterator[tuple[int, int]]:
        return _split(content, b"\n")

    def record(self, place: int) -> Any:
        """Returns the object of a line."""
        return read_json(self._text(place))


def as_source(data: Any, fields: Fields | None = None) -> Source:
    """Returns a source for any kind of data that `train` accepts.

    Args:
      data: a source; one path or a list of `pathlib.Path` (`.jsonl` and `.json` are JSON lines,
        `.parquet` and `.arrow` tables, folders datasets saved to disk, anything else is text, in
        documents of at most 256 KiB; each file may be compressed with gzip, `.gz`); a list of
        strings, of conversations or of token ids; or an [N, T] array of token ids.
      fields: the fields of a record that make a document, and the records to skip; for data in
        memory only `fields.malformed` counts.

    Raises:
      DataError: the data is none of these, or empty.
    """
    if isinstance(data, Source):
        source = data
    elif isinstance(data, str | pathlib.Path):
        source = _open([pathlib.Path(data)], fields)
    elif isinstance(data, Sequence | np.ndarray):
        if len(data) and all(isinstance(item, pathlib.Path) for item in data):
            source = _open(list(data), fields)
        elif len(data) and all(isinstance(item, str) and _is_file_name(item) for item in data):
            raise DataError(
                f"{data[0]!r} is the name of a file, and a list of strings is a list of texts. "
                "Give the files as pathlib.Path."
            )
        else:
            source = Documents(data, 0.0 if fields is None else fields.malformed)
    else:
        raise DataError(
            f"Cannot train on a {type(data).__name__}. Give a path, a list of texts or "
            "conversations, token ids, or a source of dms_jax.data."
        )
    if not len(source):
        raise DataError("There are no documents to train on.")
    return source


def fingerprint(source: Source) -> str:
    """Returns a fingerprint of a source: a digest of its length and of a sample of its documents.

    It does not depend on the paths of files. A malformed line outside the sample, which stops a
    run, can be repaired in place before resuming.

    Raises:
      DataError: a document of the sample is malformed.
    """
    count = len(source)
    digest = hashlib.sha256(f"{count}".encode())
    for index in sorted({round(at) for at in np.linspace(0, count - 1, min(count, _SAMPLED))}):
        text = json.dumps(source[index], default=_as_json, sort_keys=True)
        digest.update(hashlib.sha256(text.encode()).digest())
    return digest.hexdigest()


def _as_json(value: Any) -> Any:
    """Returns JSON data for a value that `json` cannot serialise."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else repr(value)


def _is_file_name(text: str) -> bool:
    """Whether a text is one line that ends like the name of a data file."""
    name = text.removesuffix(".gz")
    return "\n" not in text and name.endswith((".jsonl", ".json", ".txt", ".parquet", ".arrow"))


def _open(paths: list[pathlib.Path], fields: Fields | None) -> Source:
    kinds = {_kind(path) for path in paths}
    if len(kinds) > 1:
        raise DataError("Text files, JSON lines and tables cannot be mixed in one list.")
    if kinds == {"table"}:
        return Tables(paths, fields)
    if kinds == {"lines"}:
        return JsonLines(paths, fields)
    return TextFiles(paths, fields, most=_LONGEST_PART)


def _kind(path: pathlib.Path) -> str:
    if is_table(path):
        return "table"
    suffix = pathlib.Path(path.name.removesuffix(".gz")).suffix
    return "lines" if suffix in (".jsonl", ".json") else "text"
