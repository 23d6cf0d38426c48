"""Read the header of a GGUF file: its metadata, and the position of each tensor.

    magic "GGUF", version, number of tensors, number of metadata entries
    entries: key, type, value
    tensors: name, dimensions (fastest first), type, offset from the start of the data
    padding to the alignment, then the data

All numbers are little-endian. `gguf.GGUFReader` takes 10 s and 740 MB for a vocabulary of
150,000 tokens; this reader takes 0.3 s. A model may be split over several files,
name-00001-of-00003.gguf; the first one has the metadata.
"""

import dataclasses
import mmap
import pathlib
import re
import struct
from typing import Any

import numpy as np

from dms_jax.checkpoint.files import find
from dms_jax.errors import CheckpointError, plain

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SPLIT_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")

_STRING, _ARRAY = 8, 9
_NUMBERS = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """Shape, type and position of a tensor.

    Attributes:
        shape: rows first, as in NumPy.
        kind: number of its type in the GGUF format.
        offset: bytes from the start of the file.
        file: the file that contains it.
    """

    shape: tuple[int, ...]
    kind: int
    offset: int
    file: "GgufFile"


def is_gguf(path: pathlib.Path) -> bool:
    """Whether a path is a regular file with the magic bytes or the extension of GGUF."""
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC or path.suffix.lower() == ".gguf"
    except OSError:
        return path.suffix.lower() == ".gguf"


class GgufFiles:
    """A model in GGUF: one file, or all files of a split model.

    Attributes:
        name: name of the (first) file, for messages.
        metadata: its entries by key.
        tensors: every tensor by its GGUF name.

    Raises:
        CheckpointError: a file is missing, cut short, damaged, or of an unsupported version.
    """

    def __init__(self, path: pathlib.Path):
        first = GgufFile(path)
        count = first.metadata.get("split.count", 1)
        files = [first]
        if count not in (0, 1):  # 0 in a file that llama-gguf-split merged
            files = [first if p.name == path.name else GgufFile(p) for p in _parts(path, count)]
        self.name = files[0].path.name
        self.metadata = files[0].metadata
        self.tensors = {name: info for file in files for name, info in file.tensors.items()}


def _parts(path: pathlib.Path, count: Any) -> list[pathlib.Path]:
    """Finds the files of a split model, in order.

    Raises:
        CheckpointError: the file is not named as a part, or parts are missing.
    """
    named = _SPLIT_NAME.fullmatch(path.name)
    if named is None or int(named[3]) != count:
        raise CheckpointError(
            f"{path.name} is a part of a model that is split over {plain(count)} files, and its "
            "name does not say so (name-00001-of-00003.gguf): give all files their first names"
        )
    parts = [f"{named[1]}-{number:05d}-of-{named[3]}.gguf" for number in range(1, count + 1)]
    found = [path if part == path.name else find(path.parent, part) for part in parts]
    absent = [plain(part) for part, file in zip(parts, found, strict=True) if file is None]
    if absent:
        raise CheckpointError(
            f"{path.name} is a part of a model that is split over {count} files, of which "
            f"{len(absent)} are not beside it: {', '.join(absent[:20])}"
            f"{' ...' if len(absent) > 20 else ''}"
        )
    # Do not resolve links (in a hub cache): their targets have other names.
    return [path.parent / part for part in parts]


class GgufFile:
    """A single GGUF file.

    Attributes:
        path: path of the file.
        metadata: strings, bools, numbers and lists of them, by key.
        tensors: every tensor by its GGUF name.

    Raises:
        CheckpointError: it is cut short, damaged, or of an unsupported version.
    """

    def __init__(self, path: pathlib.Path):
        self.path = path
        self._bytes = _map(path)
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        header = _Header(path, self._bytes)
        num_tensors, num_entries = header.begin()
        for _ in range(num_entries):
            key = header.text("a metadata key")
            self.metadata[key] = header.value(key, header.number("<I"))
        raw = [self._tensor(header) for _ in range(num_tensors)]
        start = self._data_start(header)
        for name, shape, kind, offset in raw:
            self.tensors[name] = TensorInfo(shape, kind, start + offset, self)

    def read(self, name: str, offset: int, size: int) -> np.ndarray:
        """Reads bytes of a tensor.

        Raises:
            CheckpointError: the file is too short.
        """
        end = offset + size
        if end > len(self._bytes):
            raise CheckpointError(
                f"{self.path.name} is cut short: tensor {plain(name)} ends at byte {end}, and the "
                f"file has {len(self._bytes)}; download or copy it again"
            )
        return np.frombuffer(self._bytes, np.uint8, size, offset)

    def _tensor(self, header: "_Header") -> tuple[str, tuple[int, ...], int, int]:
        name = header.text("a tensor's name")
        num_dimensions = header.number("<I")
        shape = tuple(header.number("<Q") for _ in range(num_dimensions))[::-1]
        kind, offset = header.number("<I"), header.number("<Q")
        return name, shape, kind, offset

    def _data_start(self, header: "_Header") -> int:
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise header.damaged(f"general.alignment is {plain(alignment)}, not a power of two")
        return -(-header.position // alignment) * alignment


class _Header:
    """Reads the values of a header in order."""

    def __init__(self, path: pathlib.Path, data: mmap.mmap):
        self._path = path
        self._data = data
        self.position = 0

    def damaged(self, why: str) -> CheckpointError:
        return CheckpointError(
            f"{self._path.name} cannot be read as GGUF: {why}; download or copy it again"
        )

    def begin(self) -> tuple[int, int]:
        """Checks magic and version; returns the numbers of tensors and of metadata entries."""
        if self._take(len(MAGIC)) != MAGIC:
            raise self.damaged("it does not begin with GGUF")
        version = self.number("<I")
        if version not in _VERSIONS:
            if version and version & 0xFFFF == 0:
                raise CheckpointError(
                    f"{self._path.name} is a GGUF file for big-endian machines, which is not "
                    "supported; convert it to little-endian"
                )
            raise CheckpointError(
                f"{self._path.name} has version {version} of GGUF; supported: "
                f"{', '.join(map(str, _VERSIONS))}. Convert the model again"
            )
        return self.number("<Q"), self.number("<Q")

    def number(self, form: str) -> int:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def text(self, what: str) -> str:
        try:
            return self._take(self.number("<Q")).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.damaged(
                f"{plain(what)} is not text in UTF-8, before byte {self.position}"
            ) from error

    def value(self, key: str, kind: int) -> Any:
        what = f"metadata {key}"
        if kind == _STRING:
            return self.text(what)
        if kind in _NUMBERS:
            return self._numbers(kind, 1)[0]
        if kind != _ARRAY:
            raise self.damaged(f"{plain(what)} has the unknown type {kind}")
        kind, count = self.number("<I"), self.number("<Q")
        if kind == _STRING:
            return [self.text(what) for _ in range(count)]
        if kind in _NUMBERS:
            return self._numbers(kind, count)
        raise self.damaged(f"{plain(what)} is an array of the unknown type {kind}")

    def _numbers(self, kind: int, count: int) -> list[Any]:
        dtype = _NUMBERS[kind]
        values = np.frombuffer(self._take(count * dtype.itemsize), dtype)
        if dtype == np.float32:
            # The shortest decimal: 1e-05, not 9.999999747378752e-06.
            return [float(str(value)) for value in values]
        return values.tolist()

    def _take(self, size: int) -> bytes:
        end = self.position + size
        if end > len(self._data):
            raise self._cut_short()
        taken = self._data[self.position : end]
        self.position = end
        return taken

    def _cut_short(self) -> CheckpointError:
        return CheckpointError(
            f"{self._path.name} is cut short: its {len(self._data)} bytes end within the metadata; "
            "download or copy it again"
        )


def _map(path: pathlib.Path) -> mmap.mmap:
    """Maps a file into memory."""
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {plain(error, 200)}; download or copy it again"
        ) from error
