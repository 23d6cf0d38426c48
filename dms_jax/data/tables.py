"""Tables of records: Parquet files, and Hugging Face datasets saved to disk."""

import bisect
import json
import pathlib
from typing import Any

from dms_jax.data.files import open_table
from dms_jax.data.records import Fields, Records
from dms_jax.errors import DataError


class Tables(Records):
    """The rows of Parquet files, or of datasets saved by `datasets.save_to_disk`.

    Args:
      paths: files that end in .parquet or .arrow, or folders of saved datasets.
      fields: the fields of a row that make a document, and the rows to skip.

    Raises:
      ConfigError: pyarrow is not installed.
      DataError: a file is missing, damaged or empty, or too many rows are malformed.
    """

    def __init__(self, paths: list[pathlib.Path], fields: Fields | None = None):
        super().__init__(Fields() if fields is None else fields)
        self._tables: list[Any] = []
        self._names: list[pathlib.Path] = []
        self._first: list[int] = []
        rows = 0
        for path in paths:
            for file in _files(path):
                table = open_table(file)
                if table.num_rows:
                    self._first.append(rows)
                    self._tables.append(table)
                    self._names.append(file)
                    rows += table.num_rows
        self._rows = rows
        if not rows:
            raise DataError(f"{paths[0] if paths else 'the data'} contains no rows.")
        self.read_all()

    def count(self) -> int:
        """Returns the number of rows."""
        return self._rows

    def record(self, place: int) -> dict[str, Any]:
        """Returns a row."""
        table = bisect.bisect_right(self._first, place) - 1
        return self._tables[table].slice(place - self._first[table], 1).to_pylist()[0]

    def place(self, place: int) -> str:
        """Returns the file and the row, from 0."""
        table = bisect.bisect_right(self._first, place) - 1
        return f"{self._names[table]}, row {place - self._first[table]}"


def is_table(path: pathlib.Path) -> bool:
    """Whether a path is a table: a Parquet or Arrow file, or a saved dataset."""
    return path.suffix in (".parquet", ".arrow") or path.is_dir()


def _files(path: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files of a path: itself, a saved dataset's files, or Parquet files."""
    if not path.is_dir():
        return [path]
    if (path / "dataset_dict.json").exists():
        try:
            splits = json.loads((path / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
        except (OSError, ValueError, KeyError, TypeError):
            splits = ["..."]
        raise DataError(
            f"{path} holds several splits ({', '.join(map(str, splits))}). Give the folder of one, "
            f"{path / str(splits[0])}."
        )
    if (path / "state.json").exists():
        try:
            state = json.loads((path / "state.json").read_text(encoding="utf-8"))
            return [path / entry["filename"] for entry in state["_data_files"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path / 'state.json'} is damaged: {error!r}.") from error
    if files := sorted(path.glob("*.parquet")) or sorted(path.glob("*.arrow")):
        return files
    raise DataError(
        f"{path} is a folder without a dataset: no state.json (datasets.save_to_disk), and no "
        ".parquet or .arrow file."
    )
