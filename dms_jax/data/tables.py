"""Tables of records: Parquet files, and Hugging Face datasets saved to disk."""

import pathlib
from typing import Any

from dms_jax.data.files import open_table, read_json, read_text
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
        super().__init__(fields)
        self._tables: list[Any] = []
        self._names: list[pathlib.Path] = []
        self._rows = 0
        for path in paths:
            for file in _files(path):
                table = open_table(file)
                if table.num_rows:
                    self._first.append(self._rows)
                    self._tables.append(table)
                    self._names.append(file)
                    self._rows += table.num_rows
        if not self._rows:
            raise DataError(f"{paths[0] if paths else 'the data'} contains no rows.")
        self.read_all()

    def count(self) -> int:
        """Returns the number of rows."""
        return self._rows

    def record(self, place: int) -> dict[str, Any]:
        """Returns a row."""
        table = self._file(place)
        return self._tables[table].slice(place - self._first[table], 1).to_pylist()[0]

    def place(self, place: int) -> str:
        """Returns the file and the row, from 0."""
        table = self._file(place)
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
            splits = read_json(read_text(path / "dataset_dict.json"))["splits"]
        except (DataError, KeyError, TypeError):
            splits = ["..."]
        raise DataError(
            f"{path} holds several splits ({', '.join(map(str, splits))}). Give the folder of one, "
            f"{path / str(splits[0])}."
        )
    if (path / "state.json").exists():
        try:
            state = read_json(read_text(path / "state.json"))
            return [path / entry["filename"] for entry in state["_data_files"]]
        except (DataError, KeyError, TypeError) as error:
            raise DataError(f"{path / 'state.json'} is damaged: {error!r}.") from error
    if files := sorted(path.glob("*.parquet")) or sorted(path.glob("*.arrow")):
        return files
    raise DataError(
        f"{path} is a folder without a dataset: no state.json (datasets.save_to_disk), and no "
        ".parquet or .arrow file."
    )
