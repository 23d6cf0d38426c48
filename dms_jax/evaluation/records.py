"""Reads the records of data set files (JSON lines, JSON, CSV, tables) with their line numbers.

    for record in read_records("gsm8k/test.jsonl"):
        record.text("question")    # DataError: gsm8k/test.jsonl, line 7: there is no "question"

Texts may be compressed with gzip (`.jsonl.gz`). For a folder, all files of these kinds are read in
the order of their names.
"""

import csv
import dataclasses
import io
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from dms_jax.checks import is_whole, show
from dms_jax.data.files import open_table, read_json, read_text
from dms_jax.errors import DataError


@dataclasses.dataclass(frozen=True)
class Record:
    """One record of a file.

    Attributes:
      fields: name -> value.
      where: file and line, for messages.
    """

    fields: Mapping[str, Any]
    where: str

    def error(self, message: str) -> DataError:
        """Returns an error that names the file and the line of the record."""
        return DataError(f"{self.where}: {message}")

    def value(self, *names: str) -> Any:
        """The value of the first of these fields that is present.

        Raises:
          DataError: none of the fields is present.
        """
        for name in names:
            if self.fields.get(name) is not None:
                return self.fields[name]
        wanted = " or ".join(f'"{name}"' for name in names)
        found = ", ".join(sorted(map(str, self.fields))) or "none"
        raise self.error(f"there is no {wanted}; fields: {found}.")

    def text(self, *names: str) -> str:
        """The first present field as text; its value must be a text or a number.

        Raises:
          DataError: none of the fields is present, or the value is blank or of another type.
        """
        value = self.value(*names)
        if is_whole(value) or isinstance(value, float):
            return str(value)
        if not isinstance(value, str) or not value.strip():
            raise self.error(f'"{names[0]}" must be a text, got {show(value)}.')
        return value


def read_records(path: str | pathlib.Path) -> tuple[Record, ...]:
    """Reads all records of a file, or of the files of a folder.

    Args:
      path: `.jsonl`, `.json` (a list, or JSON lines), `.csv` with a header, `.parquet` or `.arrow`.

    Raises:
      DataError: a file is missing, empty or of another kind, or a line is malformed.
      ConfigError: the file is a table and pyarrow is not installed.
    """
    path = pathlib.Path(path)
    paths = [path]
    if path.is_dir():
        paths = sorted(each for each in path.iterdir() if _unpacked_name(each).suffix in _SUFFIXES)
        if not paths:
            raise DataError(f"{path} holds no file that ends in {', '.join(_SUFFIXES)}.")
    records: list[Record] = []
    for each in paths:
        own = [Record(fields, f"{each}, {place}") for place, fields in _read(each)]
        if not own:
            raise DataError(f"{each} contains no records.")
        records += own
    return tuple(records)


def holds_records(path: pathlib.Path) -> bool:
    """Whether a file is of a kind that `read_records` reads, by its name."""
    return _unpacked_name(path).suffix in _SUFFIXES


_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".arrow")
_Placed = Iterator[tuple[str, dict[str, Any]]]  # fields, and where in the file they stand


_TABLES = (".parquet", ".arrow")  # not compressed with gzip


def _unpacked_name(path: pathlib.Path) -> pathlib.Path:
    unpacked = pathlib.Path(path.name.removesuffix(".gz"))
    return path if unpacked.suffix in _TABLES else unpacked


def _read(path: pathlib.Path) -> _Placed:
    suffix = _unpacked_name(path).suffix
    if suffix not in _SUFFIXES:
        raise DataError(f"{path} ends in none of {', '.join(_SUFFIXES)}.")
    if suffix in _TABLES:
        return ((f"row {i}", fields) for i, fields in enumerate(open_table(path).to_pylist()))
    text = read_text(path)
    return _read_csv(path, text) if suffix == ".csv" else _read_json(path, text)


def _read_json(path: pathlib.Path, text: str) -> _Placed:
    if _unpacked_name(path).suffix == ".json" and text.lstrip().startswith("["):
        places = ((f"item {i}", each) for i, each in enumerate(read_json(text, f"{path}"), 1))
    else:
        places = (
            (f"line {i}", read_json(line, f"{path}, line {i}"))
            for i, line in enumerate(text.split("\n"), 1)
            if line.strip()
        )
    for place, fields in places:
        if not isinstance(fields, dict):
            raise DataError(f"{path}, {place}: expected a JSON object, got {show(fields)}.")
        yield place, fields


def _read_csv(path: pathlib.Path, text: str) -> _Placed:
    """Yields the rows, each with the number of its last line; a row may span several."""
    rows = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        for fields in rows:
            if None in fields or None in fields.values():
                raise DataError(
                    f"{path}, line {rows.line_num}: there are more or fewer fields than "
                    f"{', '.join(rows.fieldnames or ())}."
                )
            yield f"line {rows.line_num}", fields
    except csv.Error as error:
        raise DataError(f"{path}, line {rows.line_num + 1}: this is not CSV: {error}.") from error
