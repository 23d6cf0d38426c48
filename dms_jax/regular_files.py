"""Refuses pipes where a file of our own should be: who opens a pipe may wait forever."""

import errno
import pathlib


def check_regular(path: pathlib.Path) -> None:
    """Raises OSError if there is something that is neither a file nor a folder."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, f"{path.name} is no regular file", str(path))
