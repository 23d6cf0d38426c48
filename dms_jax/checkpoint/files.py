"""Find and read the files of a checkpoint directory."""

import json
import os
import pathlib
from typing import Any

from dms_jax.errors import CheckpointError, plain


def expanded(path: Any, what: str) -> pathlib.Path:
    """Expands `~` in a caller's path.

    Args:
        path: the path.
        what: what it is and must be, for the message.

    Raises:
        CheckpointError: the path is invalid.
    """
    if not isinstance(path, str | os.PathLike) or not str(path):
        raise CheckpointError(f"{what}: {plain(repr(path))}")
    try:
        os.fsencode(path)
        if "\0" in os.fspath(path):
            raise ValueError("it holds a null character")
        return pathlib.Path(path).expanduser()
    except (ValueError, RuntimeError, TypeError) as error:
        raise CheckpointError(f"{plain(repr(path))} is not a path: {error}") from error


def is_directory(path: pathlib.Path) -> bool:
    """Whether a directory exists.

    Raises:
        CheckpointError: the path cannot be examined (no permission, for example).
    """
    try:
        return path.is_dir()
    except OSError as error:
        raise _unreadable(path, error) from error


def find(directory: pathlib.Path, name: str) -> pathlib.Path | None:
    """Finds the file of this name in a checkpoint; None if there is none.

    Raises:
        CheckpointError: the name leads out of the directory, or is not that of a file.
    """
    if name.startswith("/") or ".." in name.split("/") or "\\" in name or "\0" in name:
        raise CheckpointError(f"the name {plain(name)} points outside the checkpoint directory")
    path = directory / name
    try:
        if path.is_file():
            return path
        there = os.path.lexists(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    if there:
        raise CheckpointError(
            f"{path} is not a file, or a link to a file that is not there; copy or download it "
            "again"
        )
    return None


def read(directory: pathlib.Path, name: str) -> bytes | None:
    """Reads a file of a checkpoint; None if there is none.

    Raises:
        CheckpointError: see `find`; or the file cannot be read.
    """
    path = find(directory, name)
    try:
        return None if path is None else path.read_bytes()
    except OSError as error:
        raise _unreadable(directory / name, error) from error


def read_text(directory: pathlib.Path, name: str) -> str | None:
    """Reads a file of UTF-8 text; see `read`."""
    content = read(directory, name)
    try:
        return None if content is None else content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{plain(name)} is not text in UTF-8 ({error.reason} at byte {error.start}): "
            "convert it, or download it again"
        ) from error


def read_json(directory: pathlib.Path, name: str) -> dict[str, Any] | None:
    """Reads a file that contains a JSON object; see `read`.

    Raises:
        CheckpointError: as for `read`; or it is not JSON, or not an object.
    """
    content = read(directory, name)
    if content is None:
        return None
    try:
        value = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{directory / name} cannot be read as JSON: {plain(error, 200)}"
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{directory / name} holds a {type(value).__name__}, not a JSON object"
        )
    return value


def _unreadable(path: pathlib.Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path} cannot be read: {error}")
