"""Packed files unpack to a size that texts have.

A few kilobytes may hold gigabytes of one letter, which fill a disk or a memory.
"""

import gzip
import os
import pathlib
import zlib
from collections.abc import Iterator

from dms_jax.errors import DataError

MOST_UNPACKED = 2**26  # bytes that any file may unpack to
MOST_TIMES = 100  # its size, that a larger one may; texts have three to ten times theirs
DAMAGED = (gzip.BadGzipFile, EOFError, zlib.error)
_PART = 2**20


class Unpacked:
    """Counts what a file unpacks to.

    Args:
      path: the file.
    """

    def __init__(self, path: pathlib.Path):
        self._path, self._size = path, 0
        self._most = max(MOST_UNPACKED, MOST_TIMES * os.stat(path).st_size)

    def count(self, size: int) -> None:
        """Counts more bytes.

        Raises:
          DataError: they are too many.
        """
        self._size += size
        if self._size > self._most:
            raise DataError(
                f"{self._path} unpacks to more than {self._most:,} bytes, which is more than "
                f"{MOST_TIMES} times its size: texts do not pack so well. If it is what you want, "
                "unpack it and give the file that comes out."
            )


def gunzip(path: pathlib.Path) -> Iterator[bytes]:
    """Yields the content of a gzip file in parts.

    Raises:
      DataError: it unpacks to too much.
      OSError: it cannot be read.
      DAMAGED: it is no whole gzip file.
    """
    unpacked = Unpacked(path)
    with gzip.open(path) as packed:
        while part := packed.read(_PART):
            unpacked.count(len(part))
            yield part
