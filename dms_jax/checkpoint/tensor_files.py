"""The files of a checkpoint: tensors in one safetensors file or in shards, and JSON beside them."""

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from dms_jax.checkpoint.weights import INDEX, SINGLE
from dms_jax.errors import CheckpointError

Tensors = Iterator[tuple[str, np.ndarray]]


def write_tensors(tensors: Tensors, directory: pathlib.Path, max_shard_bytes: int) -> None:
    """Write `model.safetensors`, or numbered shards and their index."""
    mode = mode_of(directory / "config.json")
    written: list[tuple[pathlib.Path, list[str]]] = []
    shard: dict[str, np.ndarray] = {}
    total = size = 0

    def flush() -> None:
        nonlocal shard, size
        file = directory / f"shard-{len(written)}"
        save_tensors(shard, file, mode)
        written.append((file, list(shard)))
        shard, size = {}, 0

    for name, tensor in tensors:
        check_finite(name, tensor)
        if shard and size + tensor.nbytes > max_shard_bytes:
            flush()
        shard[name] = tensor
        size += tensor.nbytes
        total += tensor.nbytes
    flush()
    if len(written) == 1:
        written[0][0].rename(directory / SINGLE)
        return
    weight_map = {}
    for number, (file, tensor_names) in enumerate(written, start=1):
        final = f"model-{number:05d}-of-{len(written):05d}.safetensors"
        file.rename(directory / final)
        weight_map |= dict.fromkeys(tensor_names, final)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(directory / INDEX, index)


def check_finite(name: str, tensor: np.ndarray) -> None:
    """Raise CheckpointError if a tensor is not finite."""
    if not np.isfinite(tensor).all():
        raise CheckpointError(
            f"tensor {name} holds NaN or infinite values; nothing was written, for it could not be "
            "loaded again"
        )


def mode_of(file: pathlib.Path) -> int:
    """The permissions of a new file."""
    return file.stat().st_mode & 0o777


def save_tensors(tensors: dict[str, np.ndarray], file: pathlib.Path, mode: int) -> None:
    """Write tensors to one file; raises OSError."""
    try:
        save_file(tensors, str(file), metadata={"format": "pt"})
    except SafetensorError as error:  # also raised when a system call fails
        raise OSError(str(error)) from error
    file.chmod(mode)  # the library makes files private


def write_json(path: pathlib.Path, content: dict[str, Any]) -> None:
    """Write an indented JSON file."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
