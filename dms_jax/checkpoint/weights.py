"""The tensors of a Hugging Face directory: `model.safetensors`, or shards named by an index.

Opening reads only the headers. A tensor, or a slice of one, is read on demand.
"""

import abc
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import safetensors

from dms_jax.checkpoint.files import find, read_json
from dms_jax.checkpoint.wrappers import language_names, parameter_names
from dms_jax.errors import CheckpointError, plain

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}

_PACKED = ("_blocks", "_scales")  # the parts of a matrix in 4 bits, see `mxfp4`


class Tensors(abc.ABC):
    """The tensors of a model under their Hugging Face names, independent of the file format.

    Attributes:
        shapes: shape of every tensor.
        dtypes: default type of every tensor when read.
        config_name: the source of the model's shape, for messages.
    """

    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, np.dtype]
    config_name: str

    @abc.abstractmethod
    def read(self, name: str, index: tuple[slice, ...] = (), dtype: Any = None) -> np.ndarray:
        """Reads a tensor, or the given slices of its dimensions, as `dtype`."""

    @abc.abstractmethod
    def file_name(self, name: str) -> str:
        """Name of the file that holds a tensor, for messages."""

    def stored_name(self, name: str) -> str:
        """Name of a tensor in its file, for messages."""
        return name


class Weights(Tensors):
    """Tensors of safetensors files, read lazily.

    Attributes:
        shapes: shape of every tensor.
        dtypes: type of every tensor.
        config_name: what describes the model's shape, for messages.

    Raises:
        CheckpointError: a file is damaged or cut short, or has numbers of an unsupported type.
    """

    config_name = "config.json"

    def __init__(self, files: Sequence[pathlib.Path]):
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, np.dtype] = {}
        self._files: dict[str, tuple[pathlib.Path, safetensors.safe_open]] = {}
        self._stored: dict[str, str] = {}
        for file in files:
            self._open(file)

    def unwrap(self) -> None:
        """Strips the prefixes that PyTorch's wrappers left in the names of the tensors.

        Raises:
          CheckpointError: two tensors have the same name afterwards.
        """
        self._rename(parameter_names(self._files))

    def keep_language_model(self) -> None:
        """Drops the tensors of the vision part; renames the others to a plain language model's."""
        self._rename(language_names(self._files))

    def _rename(self, stored: Mapping[str, str]) -> None:
        """Keeps only these tensors, under their new names."""
        self._stored = {name: self.stored_name(old) for name, old in stored.items()}
        self._files = {name: self._files[old] for name, old in stored.items()}
        self.shapes = {name: self.shapes[old] for name, old in stored.items()}
        self.dtypes = {name: self.dtypes[old] for name, old in stored.items()}

    def read(self, name: str, index: tuple[slice, ...] = (), dtype: Any = None) -> np.ndarray:
        path, handle = self._files[name]
        stored = self.stored_name(name)
        try:
            if all(part == slice(None) for part in index):
                tensor = handle.get_tensor(stored)
            else:
                tensor = handle.get_slice(stored)[index]
        except Exception as error:  # the library raises nothing more precise
            raise CheckpointError(
                f"{path.name}: tensor {plain(stored)} cannot be read: {plain(error, 300)}"
            ) from error
        with np.errstate(over="ignore"):
            return tensor if dtype is None else tensor.astype(dtype, copy=False)

    def file_name(self, name: str) -> str:
        return self._files[name][0].name

    def stored_name(self, name: str) -> str:
        return self._stored.get(name, name)

    def _open(self, path: pathlib.Path) -> None:
        try:
            handle = safetensors.safe_open(str(path), framework="numpy")
            names = list(handle.keys())
        except Exception as error:  # the library raises nothing more precise
            raise CheckpointError(
                f"{path} is not a whole safetensors file ({plain(error, 300)}): download or copy "
                "it again"
            ) from error
        for name in names:
            if name in self._files:
                raise CheckpointError(
                    f"tensor {plain(name)} is in both {self._files[name][0].name} and {path.name}"
                )
            header = handle.get_slice(name)
            packed = header.get_dtype() == "U8" and name.endswith(_PACKED)
            dtype = np.dtype(np.uint8) if packed else _DTYPES.get(header.get_dtype())
            if dtype is None:
                raise CheckpointError(
                    f"{path.name}: tensor {plain(name)} has dtype {header.get_dtype()}; supported: "
                    f"{', '.join(_DTYPES)}. Load the unquantized weights"
                )
            self._files[name] = (path, handle)
            self.shapes[name] = tuple(header.get_shape())
            self.dtypes[name] = dtype


def shard_names(directory: pathlib.Path) -> list[str] | None:
    """Names of the files in a checkpoint's index; None without an index.

    Raises:
        CheckpointError: the index is damaged.
    """
    index = read_json(directory, INDEX)
    if index is None:
        return None
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{directory / INDEX} has no weight_map of tensor to file")
    for value in weight_map.values():
        if not isinstance(value, str) or not value:
            raise CheckpointError(f"{INDEX}: a file name must be a text, got {plain(repr(value))}")
    return sorted(set(weight_map.values()))


def tensor_files(directory: pathlib.Path) -> list[pathlib.Path]:
    """Finds the files of a checkpoint that contain its tensors.

    Raises:
        CheckpointError: files are missing, or are outside the directory.
    """
    single = find(directory, SINGLE)
    if single is not None:
        return [single]
    names = shard_names(directory)
    if names is None:
        others = sorted(
            plain(file.name)
            for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.msgpack", "*.h5")
            for file in directory.glob(pattern)
        )
        hint = (
            f"; {', '.join(others[:3])} cannot be read, because only safetensors are: convert them"
            if others
            else ""
        )
        raise CheckpointError(f"{directory} holds neither {SINGLE} nor {INDEX}{hint}")
    files = {name: find(directory, name) for name in names}
    absent = [name for name, file in files.items() if file is None]
    if absent:
        raise CheckpointError(
            f"{directory} lacks {len(absent)} of {len(files)} files of tensors: "
            f"{', '.join(map(plain, absent[:20]))}{' ...' if len(absent) > 20 else ''}"
        )
    return [file for file in files.values() if file is not None]
