"""Decompression of files with a limit on the output size.

A few kilobytes may expand to gigabytes of one letter, which fill a disk or memory.
"""

import gzip
import os
import pathlib
import zlib
from collections.abc import Iterator

from dms_jax.errors import DataError

ALWAYS_ALLOWED = 2**26  # bytes that any file may decompress to
LARGEST_RATIO = 100  # for larger outputs; texts have three to ten
DAMAGED = (gzip.BadGzipFile, EOFError, zlib.error)
_PART = 2**20


class SizeLimit:
    """Counts the bytes that a file decompresses to.

    Args:
      path: the file.
    """

    def __init__(self, path: pathlib.Path):
        self._path, self._size = path, 0
        self._limit = max(ALWAYS_ALLOWED, LARGEST_RATIO * os.stat(path).st_size)

    def count(self, size: int) -> None:
        """Counts more bytes.

        Raises:
          DataError: the limit is exceeded.
        """
        self._size += size
        if self._size > self._limit:
            raise DataError(
                f"{self._path} unpacks to more than {self._limit:,} bytes, which is more than "
                f"{LARGEST_RATIO} times its size: texts do not compress so well. To use "
                "it anyway, unpack it and give the unpacked file."
            )


def gunzip(path: pathlib.Path) -> Iterator[bytes]:
    """Yields the decompressed content of a gzip file in parts.

    Raises:
      DataError: the output exceeds the limit.
      OSError: the file cannot be read.
      DAMAGED: it is no complete gzip file.
    """
    limit = SizeLimit(path)
    with gzip.open(path) as file:
        while part := file.read(_PART):
            limit.count(len(part))
            yield part
