"""Files of a checkpoint directory, read with care: JSON objects, and names that stay inside."""

import json
import pathlib
from typing import Any

from dms_jax.errors import CheckpointError

MAX_JSON_BYTES = 64 * 2**20


def read_json(path: pathlib.Path, *, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        CheckpointError: the file is missing, too large, not JSON, or not an object.
    """
    try:
        size = path.stat().st_size
        if size > max_bytes:
            raise CheckpointError(
                f"{path.name} has {size} bytes, more than the {max_bytes} that such a file can "
                "need: it is not what its name says"
            )
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not a JSON object")
    return content


def inside(directory: pathlib.Path, name: Any) -> pathlib.Path:
    """Resolve a file name that a checkpoint gives, refusing to leave the checkpoint.

    Symbolic links are followed only where the whole directory is one (a hub cache keeps its files
    under `snapshots/` as links into `blobs/` beside it), and only within that cache.

    Raises:
        CheckpointError: the name is absolute, climbs, or leads elsewhere through a link.
    """
    if not isinstance(name, str) or not name:
        raise CheckpointError(f"a shard name must be a text, got {type(name).__name__}")
    relative = pathlib.PurePosixPath(name)
    if relative.is_absolute() or ".." in relative.parts or "\\" in name or "\0" in name:
        raise CheckpointError(
            f"the shard name {name[:200]!r} leaves the checkpoint directory; it is refused"
        )
    path = directory / relative
    root = directory.resolve()
    allowed = [root]
    if root.parent.name == "snapshots" and (root.parent.parent / "blobs").is_dir():
        allowed.append((root.parent.parent / "blobs").resolve())
    resolved = path.resolve()
    if not any(resolved.is_relative_to(place) for place in allowed):
        raise CheckpointError(
            f"the shard {name[:200]!r} is a link that leaves the checkpoint directory; it is "
            "refused: copy the file itself into the directory"
        )
    return path
