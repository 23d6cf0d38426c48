"""Read the files of a checkpoint directory, which is untrusted input.

Every file of a checkpoint is found and read here. It must be a regular file (no pipe, no device)
inside the checkpoint (no link to private keys), within a size limit for its kind.
"""

import errno
import json
import os
import pathlib
import re
import stat
from typing import Any

from dms_jax.errors import CheckpointError, plain

# The most bytes by kind of file. A config takes a few kB, even with a list of a hundred layer
# types. The largest vocabularies in use take about 70 MB as JSON, the largest index a few MB.
MAX_CONFIG_BYTES = 2**20
MAX_TEMPLATE_BYTES = 2**20
MAX_INDEX_BYTES = 64 * 2**20
MAX_TOKENIZER_CONFIG_BYTES = 16 * 2**20
MAX_VOCABULARY_BYTES = 128 * 2**20

_SHARED_BLOBS = ".huggingface-shared-blobs"  # huggingface_hub's mark of a folder of shared files

# Half of a surrogate pair, escaped as in JSON. Text with one cannot be encoded.
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def expanded(path: str | os.PathLike[str]) -> pathlib.Path:
    """Expand `~` in a caller's path.

    Raises:
        CheckpointError: the path is invalid.
    """
    try:
        os.fsencode(path)
        if "\0" in os.fspath(path):
            raise ValueError("it holds a null character")
        return pathlib.Path(path).expanduser()
    except (ValueError, RuntimeError, TypeError) as error:
        raise CheckpointError(f"{plain(repr(path))} is no path: {error}") from error


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
    """Find the regular file of this name in a checkpoint, following links; None if there is none.

    Links are followed only within the checkpoint, and from a hub cache's `snapshots/` into its
    `blobs/`.

    Raises:
        CheckpointError: the name leads out of the directory, the file is a link that is broken or
            leaves it, or it is not a regular file.
    """
    if name.startswith("/") or ".." in name.split("/") or "\\" in name or "\0" in name:
        raise CheckpointError(
            f"the name {plain(name)} leaves the checkpoint directory; it is refused"
        )
    try:
        os.lstat(os.path.join(directory, name))  # first, because an index may name 100,000 files
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise _unreadable(directory / name, error) from error
    path = directory / name
    try:
        resolved = pathlib.Path(os.path.realpath(path, strict=True))
        if not any(resolved.is_relative_to(place) for place in _places(directory)):
            raise CheckpointError(
                f"{plain(name)} is a link that leaves the checkpoint directory; it is refused: "
                "copy the file itself into the directory"
            )
        mode = resolved.stat().st_mode
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{plain(name)} is a link to a file that is not there; copy or download it again"
        ) from error
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
        raise CheckpointError(
            f"{plain(name)} is {kinds.get(stat.S_IFMT(mode), 'a device')}, not a file; it is not "
            "read: remove it, or download the checkpoint again"
        )
    return resolved


def read(directory: pathlib.Path, name: str, *, max_bytes: int) -> bytes | None:
    """Read a file of a checkpoint; None if there is none.

    Raises:
        CheckpointError: see `find`; or the file is too large, or cannot be read.
    """
    path = find(directory, name)
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
    except OSError as error:
        raise _unreadable(path, error) from error
    if len(content) > max_bytes:
        raise CheckpointError(
            f"{plain(name)} has more than the {max_bytes} bytes that such a file can need: it is "
            "not what its name says"
        )
    return content


def read_text(directory: pathlib.Path, name: str, *, max_bytes: int) -> str | None:
    """Read a file of UTF-8 text; see `read`."""
    content = read(directory, name, max_bytes=max_bytes)
    try:
        return None if content is None else content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{plain(name)} is not text in UTF-8 ({error.reason} at byte {error.start}): "
            "convert it, or download it again"
        ) from error


def read_json(directory: pathlib.Path, name: str, *, max_bytes: int) -> dict[str, Any] | None:
    """Read a file that contains a JSON object; see `read`.

    Raises:
        CheckpointError: as for `read`; or it is not JSON, not an object, or has an incomplete
            surrogate pair.
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
            "text again"
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
    """Directories that may contain the files of a checkpoint: itself, and those of its hub cache.

    # cache/models--owner--name/snapshots/0123abcd/config.json -> ../../blobs/4567 (a file),
    # which may itself be a link -> ../../blobs/89/89ab, shared by the models of the cache
    """
    root = pathlib.Path(os.path.realpath(directory, strict=True))
    if root.parent.name != "snapshots":
        return [root]
    model = root.parent.parent
    own, shared = model / "blobs", model.parent / "blobs"
    # A linked folder could point anywhere.
    places = [own] if own.is_dir() and not own.is_symlink() else []
    if (shared / _SHARED_BLOBS).is_file() and not shared.is_symlink():
        places.append(shared)
    return [root, *places]


def _unreadable(path: pathlib.Path, error: OSError | ValueError) -> CheckpointError:
    circle = isinstance(error, OSError) and error.errno == errno.ELOOP
    why = "its links lead in a circle" if circle else error
    return CheckpointError(f"{path} cannot be read: {why}")
