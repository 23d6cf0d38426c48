"""Assign the tensors of a checkpoint to files, and the files to processes.

Tensors are ordered by parameter, layer and piece. A new file begins when the last one is full, so
that several processes write the same files as one. Whole files are assigned to processes, the
largest first, each to the process with the least to write. A process holds its files in host
memory: at most one file more than its share.

A file has one writer, which receives whole tensors. Processes could instead write their devices'
rows into one file, but training splits the embedding dimension, which runs along the rows of most
matrices in a file: at 128 shards the pieces would have 128 bytes, and network file systems do not
guarantee that adjacent writes of several hosts both arrive.

Arrays sharded over processes are gathered on all devices one layer at a time, as in a training
step. The processes take turns keeping a layer, so that they copy to their hosts in parallel.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from dms_jax import processes
from dms_jax.checkpoint import names
from dms_jax.checkpoint.weights import SINGLE
from dms_jax.config import ModelConfig

Arrays = Mapping[names.Path, Any]
# A parameter, and its layer if it is stacked.
Part = tuple[names.Path, int | None]
Tensors = Iterator[tuple[str, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of a checkpoint.

    Attributes:
        part: the part of a parameter that it holds.
        piece: its piece within that part.
        nbytes: its size.
    """

    part: Part
    piece: names.Piece
    nbytes: int

    @property
    def name(self) -> str:
        """Its Hugging Face name."""
        return self.piece.layout.tensor_name(self.part[1] or 0)

    def cut(self, part: np.ndarray) -> np.ndarray:
        """Its piece of the part."""
        return part[self.piece.index(part.ndim)]


@dataclasses.dataclass(frozen=True)
class TensorFile:
    """A file of tensors in order, and the process that writes it."""

    name: str
    tensors: tuple[Tensor, ...]
    process: int

    @property
    def nbytes(self) -> int:
        """The size of its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)


def list_tensors(arrays: Arrays, config: ModelConfig) -> list[Tensor]:
    """Lists the tensors of a config's parameters in order."""
    found = []
    for path, value in arrays.items():
        pieces = names.pieces_of(config)[path]
        stacked = pieces[0].layout.stacked
        shape = value.shape[1:] if stacked else value.shape
        for layer in range(value.shape[0]) if stacked else (None,):
            for piece in pieces:
                size = int(np.prod(piece.shape(shape))) * np.dtype(value.dtype).itemsize
                found.append(Tensor((path, layer), piece, size))
    return found


def plan_shards(tensors: list[Tensor], max_file_bytes: int) -> list[TensorFile]:
    """Puts tensors into files of at most `max_file_bytes` (or one tensor), and assigns writers."""
    cut: list[list[Tensor]] = []
    room = 0
    for tensor in tensors:
        if not cut or tensor.nbytes > room:
            cut.append([])
            room = max_file_bytes
        cut[-1].append(tensor)
        room -= tensor.nbytes
    sizes = [sum(tensor.nbytes for tensor in file) for file in cut]
    # Processes of one host have adjacent numbers, so a few files go to evenly spaced processes.
    count, of = min(len(cut), jax.process_count()), jax.process_count()
    loads = {place * of // count: 0 for place in range(count)}
    owners = [0] * len(cut)
    for number in sorted(range(len(cut)), key=lambda number: -sizes[number]):
        owners[number] = min(loads, key=lambda process: loads[process])
        loads[owners[number]] += sizes[number]
    called = [f"model-{i:05d}-of-{len(cut):05d}.safetensors" for i in range(1, len(cut) + 1)]
    if len(cut) == 1:
        called = [SINGLE]
    return [TensorFile(*each) for each in zip(called, map(tuple, cut), owners, strict=True)]


def own_tensors(arrays: Arrays, files: list[TensorFile]) -> Tensors:
    """Yields the tensors that this process writes, in the order of its files.

    Every process calls this. With several processes it first moves all tensors to their writers'
    hosts, where each stays until it is yielded. A single process moves one parameter at a time.
    """
    owners: dict[Part, set[int]] = {}
    for file in files:
        for tensor in file.tensors:
            owners.setdefault(tensor.part, set()).add(file.process)
    here = jax.process_index()
    own = [tensor for file in files if file.process == here for tensor in file.tensors]
    parts = list(owners)
    if processes.several():
        parts = _gather_order(arrays, owners)
    asked = ((arrays[path], at, here in owners[path, at]) for path, at in parts)
    moved = processes.parts(asked)
    if not processes.several():
        return _converted(own, moved)
    held: dict[str, np.ndarray] = {}
    of_part = {part: list(each) for part, each in itertools.groupby(own, lambda each: each.part)}
    for key, part in zip(parts, moved, strict=True):
        for tensor in of_part.get(key, ()):
            assert part is not None
            # A copy of the piece: a view would keep the whole array alive.
            held[tensor.name] = np.array(tensor.cut(part))
    return ((each.name, each.piece.layout.to_tensor(held.pop(each.name))) for each in own)


def _converted(tensors: list[Tensor], moved: Iterator[np.ndarray | None]) -> Tensors:
    for (_, of_part), part in zip(
        itertools.groupby(tensors, lambda each: each.part), moved, strict=True
    ):
        assert part is not None
        for tensor in of_part:
            yield tensor.name, tensor.piece.layout.to_tensor(tensor.cut(part))


def _gather_order(arrays: Arrays, owners: Mapping[Part, set[int]]) -> list[Part]:
    """Orders the parts: those on every process first, then the others, one per owner in turn."""
    turns: dict[int, list[Part]] = {}
    first = []
    for part, of in owners.items():
        if processes.is_here(arrays[part[0]]):
            first.append(part)
        else:
            turns.setdefault(min(of), []).append(part)
    others = itertools.chain.from_iterable(itertools.zip_longest(*turns.values()))
    return [*first, *(part for part in others if part is not None)]
