"""The tensors of a Hugging Face directory: `model.safetensors`, or shards named by an index.

Opening reads headers only. A tensor, or a slice of one, is read when it is asked for.
"""

import pathlib

import ml_dtypes
import numpy as np
import safetensors

from dms_jax.checkpoint.files import inside, read_json
from dms_jax.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


class Weights:
    """Tensors by name, read lazily.

    Attributes:
        shapes: of every tensor.
        dtypes: of every tensor.

    Raises:
        CheckpointError: files are missing, damaged or cut short, lie outside the directory, or
            hold numbers of a kind that is not served.
    """

    def __init__(self, directory: pathlib.Path):
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, np.dtype] = {}
        self._files: dict[str, tuple[pathlib.Path, safetensors.safe_open]] = {}
        for file in _shards(directory):
            self._open(file)

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """Read a tensor, or the given slices of its dimensions."""
        path, handle = self._files[name]
        try:
            if all(part == slice(None) for part in index):
                return handle.get_tensor(name)
            return handle.get_slice(name)[index]
        except Exception as error:  # the library raises nothing more precise
            raise CheckpointError(f"{path.name}: tensor {name} cannot be read: {error}") from error

    def _open(self, path: pathlib.Path) -> None:
        try:
            handle = safetensors.safe_open(str(path), framework="numpy")
            names = list(handle.keys())
        except Exception as error:  # the library raises nothing more precise
            raise CheckpointError(
                f"{path} is not a whole safetensors file ({error}): download or copy it again"
            ) from error
        for name in names:
            if name in self._files:
                raise CheckpointError(
                    f"tensor {name} is in both {self._files[name][0].name} and {path.name}"
                )
            header = handle.get_slice(name)
            dtype = _DTYPES.get(header.get_dtype())
            if dtype is None:
                raise CheckpointError(
                    f"{path.name}: tensor {name} holds {header.get_dtype()} numbers, which are "
                    f"not served (served: {', '.join(_DTYPES)}); load the unquantized weights"
                )
            self._files[name] = (path, handle)
            self.shapes[name] = tuple(header.get_shape())
            self.dtypes[name] = dtype


def _shards(directory: pathlib.Path) -> list[pathlib.Path]:
    """Files that hold the tensors."""
    if (directory / SINGLE).exists() or (directory / SINGLE).is_symlink():
        names = [SINGLE]
    elif (directory / INDEX).is_file():
        weight_map = read_json(directory / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{directory / INDEX} has no weight_map of tensor to file")
        names = sorted(set(_texts(weight_map.values())))
    else:
        others = sorted(
            file.name
            for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.msgpack", "*.h5")
            for file in directory.glob(pattern)
        )
        hint = (
            f"; {', '.join(others[:3])} cannot be read, because only safetensors are: convert them"
            if others
            else ""
        )
        raise CheckpointError(f"{directory} holds neither {SINGLE} nor {INDEX}{hint}")
    files = [inside(directory, name) for name in names]
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise CheckpointError(
            f"{directory} lacks {len(absent)} of {len(files)} files of tensors: {', '.join(absent)}"
        )
    return files


def _texts(values) -> list[str]:
    values = list(values)
    for value in values:
        if not isinstance(value, str):
            raise CheckpointError(
                f"{INDEX}: a file name must be a text, got {type(value).__name__}"
            )
    return values
