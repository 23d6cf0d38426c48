"""Open data files, for training and for evaluation.

Text files are memory-mapped; those that end in .gz are first unpacked into a temporary file. Tables
are read through Arrow (pip install 'dms-jax[data]'), also memory-mapped: a table larger than memory
takes only the memory of its pages in use. Parquet is compressed, so an uncompressed copy is written
to a temporary file.
"""

import gzip
import json
import mmap
import pathlib
import shutil
import tempfile
import zlib
from typing import Any

from dms_jax.errors import DataError
from dms_jax.extras import import_extra

_ROWS_AT_A_TIME = 1024


def map_text(path: pathlib.Path) -> mmap.mmap:
    """Returns the content of a text file, unpacked.

    Raises:
      DataError: it is missing, empty, damaged or a pipe.
    """
    if path.is_fifo():
        raise DataError(f"{path} is a pipe; a regular file is needed, as it is read several times.")
    try:
        if path.suffix != ".gz":
            with path.open("rb") as file:
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        with gzip.open(path) as packed, tempfile.TemporaryFile() as unpacked:
            shutil.copyfileobj(packed, unpacked)
            unpacked.flush()
            return mmap.mmap(unpacked.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError as error:
        raise DataError(f"{path} is empty.") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path} is not a complete gzip file: {error}.") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error


def read_text(path: pathlib.Path) -> str:
    """Returns the content of a text file, unpacked and without a byte-order mark.

    Raises:
      DataError: it is missing, empty, damaged, a pipe, or not UTF-8.
    """
    try:
        return map_text(path)[:].decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}.") from error


def read_json(text: str, where: str = "") -> Any:
    """Returns the value of a JSON text.

    Args:
      text: the text.
      where: where it stands, for the message.

    Raises:
      DataError: it is not JSON.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}{where and ': '}this is not JSON: {error}") from error


def open_table(path: pathlib.Path) -> Any:
    """Returns the table of a Parquet file, or of an Arrow file.

    Raises:
      ConfigError: pyarrow is not installed.
      DataError: the file is missing or damaged.
    """
    pyarrow, *_ = (
        import_extra(module, extra="data", purpose=f"Reading {path}")
        for module in ("pyarrow", "pyarrow.ipc", "pyarrow.parquet")
    )
    try:
        if path.suffix == ".parquet":
            return _table_of_copy(pyarrow, path)
        file = pyarrow.memory_map(str(path))
        try:
            return pyarrow.ipc.open_stream(file).read_all()
        except pyarrow.ArrowInvalid:
            return pyarrow.ipc.open_file(file).read_all()
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _table_of_copy(pyarrow: Any, path: pathlib.Path) -> Any:
    """Returns a Parquet file's table, from an uncompressed copy that goes with the table."""
    file = pyarrow.parquet.ParquetFile(path)
    with tempfile.NamedTemporaryFile(suffix=".arrow") as copy:
        with pyarrow.ipc.new_stream(copy.name, file.schema_arrow) as writer:
            for batch in file.iter_batches(batch_size=_ROWS_AT_A_TIME):
                writer.write_batch(batch)
        # The mapping keeps the file's content once its name is gone.
        return pyarrow.ipc.open_stream(pyarrow.memory_map(copy.name)).read_all()
