"""The files of a checkpoint: tensors in one safetensors file or in several, and JSON beside them.

Tensors are ordered by parameter, layer and piece. Several processes gather arrays that are sharded
over them one layer at a time, as in a training step. The first process writes all files, and its
host holds one of them at a time.
"""

import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from dms_jax import processes
from dms_jax.checkpoint import names
from dms_jax.checkpoint.weights import INDEX, SINGLE
from dms_jax.config import ModelConfig
from dms_jax.errors import CheckpointError
from dms_jax.model.parameters import Path

Tensors = Iterator[tuple[str, np.ndarray]]


def tensors_of(parameters: Mapping[Path, Any], config: ModelConfig) -> Tensors:
    """Yield the tensors of parameters under their Hugging Face names, in the first process.

    Every process must run the iterator to its end.
    """
    parts = []
    for path, value in parameters.items():
        stacked = names.pieces_of(config)[path][0].layout.stacked
        parts += [(path, layer) for layer in (range(value.shape[0]) if stacked else [None])]
    moved = processes.parts((parameters[path], layer) for path, layer in parts)
    for (path, layer), part in zip(parts, moved, strict=True):
        if part is None:
            continue
        for piece in names.pieces_of(config)[path]:
            tensor = piece.layout.to_tensor(part[piece.index(part.ndim)])
            yield piece.layout.tensor_name(layer or 0), tensor


def write_tensors(tensors: Tensors, directory: pathlib.Path, most_bytes: int) -> None:
    """Write tensors into files of at most `most_bytes` (or one tensor), with an index if several.

    Raises:
        CheckpointError: a tensor is not finite.
        OSError: a file cannot be written.
    """
    files: list[list[str]] = []
    content: dict[str, np.ndarray] = {}
    held = total = 0
    for name, tensor in tensors:
        check_finite(name, tensor)
        if content and held + tensor.nbytes > most_bytes:
            save_tensors(content, directory / _numbered(len(files)))
            files.append(list(content))
            content, held = {}, 0
        content[name] = tensor
        held, total = held + tensor.nbytes, total + tensor.nbytes
    save_tensors(content, directory / (_numbered(len(files)) if files else SINGLE))
    if not files:
        return
    files.append(list(content))
    weight_map = {}
    for number, contained in enumerate(files):
        name = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        (directory / _numbered(number)).rename(directory / name)
        weight_map |= dict.fromkeys(contained, name)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(directory / INDEX, index)


def _numbered(number: int) -> str:
    """The name of a file while their number is unknown."""
    return f"model-{number + 1:05d}.safetensors"


def check_finite(name: str, tensor: np.ndarray) -> None:
    """Raises CheckpointError if a tensor is not finite."""
    if not np.isfinite(tensor).all():
        raise CheckpointError(
            f"tensor {name} holds NaN or infinite values and could not be loaded again; nothing "
            "was written"
        )


def save_tensors(tensors: dict[str, np.ndarray], file: pathlib.Path) -> None:
    """Writes tensors to one file; raises OSError."""
    try:
        save_file(tensors, str(file), metadata={"format": "pt"})
    except SafetensorError as error:  # also raised when a system call fails
        raise OSError(str(error)) from error
    # The library makes files private; other files and the directory follow the umask.
    file.chmod(file.parent.stat().st_mode & 0o666)


def write_json(path: pathlib.Path, content: dict[str, Any]) -> None:
    """Writes an indented JSON file."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
