"""Files of a checkpoint directory, which a stranger may have made, read with care.

Everything that is read from a checkpoint is found and read here. It must be a regular file (not a
pipe that never ends, nor a device), lie inside the checkpoint (not behind a link to somebody's
keys), and be no larger than a file of its kind can need.
"""

import errno
import json
import os
import pathlib
import re
import stat
from typing import Any

from dms_jax.errors import CheckpointError, plain

# Bytes by kind. A config is a few kB: one list of a hundred layer types is the most there is.
# The largest vocabularies in use come to about 70 MB as JSON, the largest index to a few.
MAX_CONFIG_BYTES = 2**20
MAX_TEMPLATE_BYTES = 2**20
MAX_INDEX_BYTES = 64 * 2**20
MAX_TOKENIZER_CONFIG_BYTES = 16 * 2**20
MAX_VOCABULARY_BYTES = 128 * 2**20

_SHARED_BLOBS = ".huggingface-shared-blobs"  # huggingface_hub's mark of a folder of shared files

# Half of a surrogate pair, as JSON may write it: no text that can be encoded holds one.
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def expanded(path: str | os.PathLike[str]) -> pathlib.Path:
    """The path that a caller gives, with `~` for the home directory.

    Raises:
        CheckpointError: it is no path that a system can have.
    """
    try:
        os.fsencode(path)
        if "\0" in os.fspath(path):
            raise ValueError("it holds a null character")
        return pathlib.Path(path).expanduser()
    except (ValueError, RuntimeError, TypeError) as error:
        raise CheckpointError(f"{plain(repr(path))} is no path: {error}") from error


def find(directory: pathlib.Path, name: str) -> pathlib.Path | None:
    """The regular file of this name in a checkpoint, links followed; None where there is none.

    Links are followed only within the checkpoint, and from a hub cache's `snapshots/` into its
    `blobs/`.

    Raises:
        CheckpointError: the name climbs out of the directory, the file is a link that leaves it or
            leads nowhere, or it is no regular file.
    """
    relative = pathlib.PurePosixPath(name)
    if relative.is_absolute() or ".." in relative.parts or "\\" in name or "\0" in name:
        raise CheckpointError(
            f"the name {plain(name)} leaves the checkpoint directory; it is refused"
        )
    path = directory / relative
    try:
        resolved = pathlib.Path(os.path.realpath(path, strict=True))
        if not any(resolved.is_relative_to(place) for place in _places(directory)):
            raise CheckpointError(
                f"{plain(name)} is a link that leaves the checkpoint directory; it is refused: "
                "copy the file itself into the directory"
            )
        mode = resolved.stat().st_mode
    except FileNotFoundError as error:
        if not path.is_symlink():
            return None
        raise CheckpointError(
            f"{plain(name)} is a link to a file that is not there; copy or download it again"
        ) from error
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    _check_regular(name, mode)
    return resolved


def read(directory: pathlib.Path, name: str, *, max_bytes: int) -> bytes | None:
    """The contents of a checkpoint's file; None where there is none.

    Raises:
        CheckpointError: see `find`; or the file is too large, or cannot be read.
    """
    path = find(directory, name)
    if path is None:
        return None
    # What stood there when it was found may have been exchanged: without waiting for a pipe's
    # other end, and without another link.
    flags = os.O_RDONLY
    for flag in ("O_NONBLOCK", "O_NOFOLLOW", "O_CLOEXEC", "O_BINARY"):
        flags |= getattr(os, flag, 0)
    try:
        with open(os.open(path, flags), "rb") as file:
            status = os.fstat(file.fileno())
            _check_regular(name, status.st_mode)
            # A file may grow, or not know its size (those under /proc).
            content = b"" if status.st_size > max_bytes else file.read(max_bytes + 1)
    except OSError as error:
        raise _unreadable(path, error) from error
    size = max(status.st_size, len(content))
    if size > max_bytes:
        raise CheckpointError(
            f"{plain(name)} has {size} bytes, more than the {max_bytes} that such a file can "
            "need: it is not what its name says"
        )
    return content


def read_text(directory: pathlib.Path, name: str, *, max_bytes: int) -> str | None:
    """As `read`, of a file of UTF-8."""
    content = read(directory, name, max_bytes=max_bytes)
    try:
        return None if content is None else content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{plain(name)} is not text in UTF-8 ({error.reason} at byte {error.start}): "
            "convert it, or download it again"
        ) from error


def read_json(directory: pathlib.Path, name: str, *, max_bytes: int) -> dict[str, Any] | None:
    """As `read`, of a file that holds a JSON object.

    Raises:
        CheckpointError: see `read`; or it is not JSON, not an object, or holds half of a character.
    """
    content = read(directory, name, max_bytes=max_bytes)
    if content is None:
        return None
    try:
        value = json.loads(content.decode("utf-8"))
        if _SURROGATE.search(content):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise CheckpointError(
            f"{directory / name} holds half of a surrogate pair, which is no character; write the "
            "text anew"
        ) from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise CheckpointError(
            f"{directory / name} cannot be read as JSON: {plain(error, 200)}"
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{directory / name} holds a {type(value).__name__}, not a JSON object"
        )
    return value


def _places(directory: pathlib.Path) -> list[pathlib.Path]:
    """Where the files of a checkpoint may lie: in it, and in the hub cache that it is part of.

    # cache/models--owner--name/snapshots/0123abcd/config.json -> ../../blobs/4567 (a file),
    # which may itself be a link -> ../../blobs/89/89ab, shared by the models of the cache
    """
    root = pathlib.Path(os.path.realpath(directory, strict=True))
    if root.parent.name != "snapshots":
        return [root]
    model = root.parent.parent
    own, shared = model / "blobs", model.parent / "blobs"
    # A folder that is a link itself could lead anywhere.
    places = [own] if own.is_dir() and not own.is_symlink() else []
    if (shared / _SHARED_BLOBS).is_file() and not shared.is_symlink():
        places.append(shared)
    return [root, *places]


def _check_regular(name: str, mode: int) -> None:
    kinds = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    if not stat.S_ISREG(mode):
        raise CheckpointError(
            f"{plain(name)} is {kinds.get(stat.S_IFMT(mode), 'a device')}, not a file; it is not "
            "read: remove it, or download the checkpoint again"
        )


def _unreadable(path: pathlib.Path, error: OSError | ValueError) -> CheckpointError:
    circle = isinstance(error, OSError) and error.errno == errno.ELOOP
    why = "its links lead in a circle" if circle else error
    return CheckpointError(f"{path} cannot be read: {why}")
