"""The files of a checkpoint: tensors in one safetensors file or in shards, and JSON beside them."""

import itertools
import json
import pathlib
from collections.abc import Iterable
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from dms_jax.checkpoint.shard_plan import TensorFile, Tensors
from dms_jax.checkpoint.weights import INDEX
from dms_jax.errors import CheckpointError


def write_tensors(tensors: Tensors, directory: pathlib.Path, files: Iterable[TensorFile]) -> None:
    """Writes the tensors into files, in the given order."""
    for file in files:
        content = {}
        for name, tensor in itertools.islice(tensors, len(file.tensors)):
            check_finite(name, tensor)
            content[name] = tensor
        save_tensors(content, directory / file.name)


def write_index(directory: pathlib.Path, files: list[TensorFile]) -> None:
    """Writes the index, tensor -> file, if there are several files."""
    if len(files) > 1:
        weight_map = {tensor.name: file.name for file in files for tensor in file.tensors}
        total = sum(file.nbytes for file in files)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(directory / INDEX, index)


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
