"""Reads the records of data set files (JSON lines, JSON, CSV, parquet) with their line numbers.

    for record in read_records("gsm8k/test.jsonl"):
        record.text("question")    # DataError: gsm8k/test.jsonl, line 7: there is no "question"

JSON lines may be compressed with gzip (`.jsonl.gz`). For a folder, all files of these kinds are
read in the order of their names.
"""

import csv
import dataclasses
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dms_jax.checks import is_whole, show
from dms_jax.data.decompression import DAMAGED, gunzip
from dms_jax.errors import DataError
from dms_jax.evaluation.extras import import_extra


@dataclasses.dataclass(frozen=True)
class Record:
    """One record of a file.

    Attributes:
      fields: name -> value.
      where: file and line, for messages.
      file: the name of the file without its suffix.
    """

    fields: Mapping[str, Any]
    where: str
    file: str

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

    def texts(self, name: str) -> tuple[str, ...]:
        """A field with a list of two or more texts.

        Raises:
          DataError: it is anything else.
        """
        value = self.value(name)
        if (
            isinstance(value, str)
            or not isinstance(value, Sequence)
            or len(value) < 2
            or not all(isinstance(each, str) and each.strip() for each in value)
        ):
            raise self.error(f'"{name}" must be a list of texts, got {show(value)}.')
        return tuple(value)

    def index(self, *names: str, below: int, first: int = 0) -> int:
        """A field with the index of the right option, counted from 0.

        Args:
          names: possible names of the field; the first present one counts.
          below: number of options.
          first: the file's number of the first option.

        Raises:
          DataError: the value is no valid index.
        """
        value = self.value(*names)
        if isinstance(value, str) and value.strip().isdecimal():
            value = int(value)
        if not (is_whole(value) or isinstance(value, bool)) or not first <= value < first + below:
            raise self.error(
                f'"{names[0]}" must be a number from {first} to {first + below - 1}, got '
                f"{show(value)}."
            )
        return int(value) - first


def read_records(
    path: str | pathlib.Path, *, columns: Sequence[str] | None = None
) -> tuple[Record, ...]:
    """Reads all records of a file, or of the files of a folder.

    Args:
      path: `.jsonl`, `.jsonl.gz`, `.json` (a list, or JSON lines), `.csv` or `.parquet`.
      columns: names of the fields of CSV files without a header; None if CSV files have one.

    Raises:
      DataError: a file is missing, empty or of another kind, or a line is malformed.
      ConfigError: the file is parquet and pyarrow is not installed.
    """
    path = pathlib.Path(path)
    paths = [path]
    if path.is_dir():
        paths = sorted(each for each in path.iterdir() if each.name.endswith(_SUFFIXES))
        if not paths:
            raise DataError(f"{path} holds no file that ends in {', '.join(_SUFFIXES)}.")
    records: list[Record] = []
    for each in paths:
        before = len(records)
        try:
            records += _read(each, columns)
        except OSError as error:
            raise DataError(f"{each} cannot be read: {error.strerror}.") from error
        except UnicodeDecodeError as error:
            raise DataError(f"{each} is not UTF-8 text: {error}.") from error
        if len(records) == before:
            raise DataError(f"{each} holds no record.")
    return tuple(records)


_PACKED = ".jsonl.gz"
_SUFFIXES = (".jsonl", _PACKED, ".json", ".csv", ".parquet")


def _read(path: pathlib.Path, columns: Sequence[str] | None) -> Iterator[Record]:
    if path.suffix == ".csv":
        return _read_csv(path, columns)
    if path.suffix == ".parquet":
        return _read_parquet(path)
    if path.suffix in (".jsonl", ".json") or path.name.endswith(_PACKED):
        return _read_json(path)
    raise DataError(f"{path} ends in none of {', '.join(_SUFFIXES)}.")


def _read_json(path: pathlib.Path) -> Iterator[Record]:
    content = _unpacked(path).decode("utf-8")
    if path.suffix == ".json" and content.lstrip().startswith("["):
        places = ((f"item {i}", each) for i, each in enumerate(_parse(content, f"{path}"), 1))
    else:
        places = (
            (f"line {i}", _parse(line, f"{path}, line {i}"))
            for i, line in enumerate(content.split("\n"), 1)
            if line.strip()
        )
    for place, fields in places:
        if not isinstance(fields, dict):
            raise DataError(f"{path}, {place}: expected a JSON object, got {show(fields)}.")
        yield Record(fields, f"{path}, {place}", path.name.partition(".json")[0])


def _unpacked(path: pathlib.Path) -> bytes:
    if not path.name.endswith(_PACKED):
        return path.read_bytes()
    try:
        return b"".join(gunzip(path))
    except DAMAGED as error:
        raise DataError(f"{path} is not a whole gzip file: {error}.") from error


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: this is not JSON: {error}.") from error


def _read_csv(path: pathlib.Path, columns: Sequence[str] | None) -> Iterator[Record]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file, strict=True)
        while True:
            line = rows.line_num + 1  # a row may span several lines
            try:
                row = next(rows, None)
            except csv.Error as error:
                raise DataError(f"{path}, line {line}: this is not CSV: {error}.") from error
            if row is None:
                return
            if columns is None:
                columns = row
                continue
            if not row:
                continue
            if len(row) != len(columns):
                raise DataError(
                    f"{path}, line {line}: {len(columns)} fields were expected "
                    f"({', '.join(columns)}), and there are {len(row)}."
                )
            yield Record(dict(zip(columns, row, strict=True)), f"{path}, line {line}", path.stem)


def _read_parquet(path: pathlib.Path) -> Iterator[Record]:
    with path.open("rb"):
        pass  # raise OSError for a missing file, not pyarrow's error
    parquet = import_extra("pyarrow.parquet", package="pyarrow", purpose=f"Reading {path}")
    pyarrow = import_extra("pyarrow", package="pyarrow", purpose=f"Reading {path}")
    try:
        rows = parquet.read_table(path).to_pylist()
    except pyarrow.ArrowException as error:
        raise DataError(f"{path} is not a parquet file: {error}.") from error
    for number, fields in enumerate(rows, 1):
        yield Record(fields, f"{path}, row {number}", path.stem)
