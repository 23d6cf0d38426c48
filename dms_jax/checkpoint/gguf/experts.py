"""Stack the matrices of experts like transformers does for gpt-oss.

    experts.0.gate_proj.weight [F, E], experts.0.up_proj.weight [F, E], ...
    experts.gate_up_proj [X, E, 2 F], in which the columns of gate and up alternate
    experts.down_proj [X, F, E]

Biases are stacked in the same way, experts.gate_up_proj_bias [X, 2 F].
"""

import re
from typing import Any

import numpy as np

from dms_jax.checkpoint.weights import Tensors
from dms_jax.errors import CheckpointError, plain

_NAME = re.compile(r"(.+\.experts\.)(\d+)\.(gate|up|down)_proj\.(weight|bias)")
_ROWS = 64  # transposed at a time
_PARTS = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}


class StackedExperts(Tensors):
    """Tensors by name, with experts stacked.

    Args:
        parts: the tensors, one per expert.

    Raises:
        CheckpointError: experts differ in shape, or some lack a tensor.
    """

    def __init__(self, parts: Tensors):
        self.config_name, self._parts = parts.config_name, parts
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, np.dtype] = {}
        # The tensors of each stack: a list of experts, each with one tensor or with gate and up.
        self._stacks: dict[str, list[tuple[str, ...]]] = {}
        counts: dict[tuple[str, str], int] = {}
        for name in parts.shapes:
            if found := _NAME.fullmatch(name):
                layer, kind = found[1], found[4]
                counts[layer, kind] = max(counts.get((layer, kind), 0), int(found[2]) + 1)
            else:
                self.shapes[name], self.dtypes[name] = parts.shapes[name], parts.dtypes[name]
        for (layer, kind), count in counts.items():
            for whole, each in _PARTS.items():
                self._stack(
                    f"{layer}{whole}{'' if kind == 'weight' else '_bias'}",
                    [
                        tuple(f"{layer}{expert}.{part}_proj.{kind}" for part in each)
                        for expert in range(count)
                    ],
                )

    def read(self, name: str, index: tuple[slice, ...] = (), dtype: Any = None) -> np.ndarray:
        if name not in self._stacks:
            return self._parts.read(name, index, dtype)
        dtype = self.dtypes[name] if dtype is None else np.dtype(dtype)
        shape = self.shapes[name]
        index = index or (slice(None),) * len(shape)
        stack = self._stacks[name][index[0]]
        alternate = len(stack[0]) if stack else 1
        # Columns of a stack are rows of its tensors; those of gate and up alternate.
        columns = range(shape[-1])[index[-1]]
        first, last = columns.start // alternate, -(-columns.stop // alternate)
        rows = slice(first, max(first, last))
        inputs = [range(size)[cut] for size, cut in zip(shape[1:-1], index[1:-1], strict=True)]
        sizes = [len(each) for each in inputs]
        out = np.empty((len(stack), *sizes, (rows.stop - first) * alternate), dtype)
        for matrix, tensors in zip(out, stack, strict=True):
            for place, tensor in enumerate(tensors):
                part = self._parts.read(tensor, (rows, *index[1:-1]), dtype)
                for row in range(0, len(part), _ROWS):  # three times as fast as in one step
                    cut = slice(alternate * row + place, alternate * (row + _ROWS), alternate)
                    matrix[..., cut] = part[row : row + _ROWS].T
        start = columns.start - first * alternate
        return out[..., start : start + len(columns)]

    def file_name(self, name: str) -> str:
        return self._parts.file_name(self._first(name))

    def stored_name(self, name: str) -> str:
        return self._parts.stored_name(self._first(name))

    def _first(self, name: str) -> str:
        return self._stacks[name][0][0] if name in self._stacks else name

    def _stack(self, name: str, stack: list[tuple[str, ...]]) -> None:
        """Adds a stack, if all its tensors exist and have the same shape."""
        tensors = [tensor for expert in stack for tensor in expert]
        shapes = {self._parts.shapes.get(tensor) for tensor in tensors}
        shape = self._parts.shapes.get(tensors[0])
        if shape is None or len(shapes) > 1:
            stored = {self._parts.stored_name(tensor) for tensor in tensors}
            raise CheckpointError(
                f"{', '.join(plain(each) for each in sorted(stored))}: experts differ in shape, or "
                "lack a tensor; download the file again"
            )
        self._stacks[name] = stack
        width = shape[0] * len(stack[0])
        self.shapes[name] = (len(stack), *shape[1:], width)
        dtypes = {self._parts.dtypes[tensor] for tensor in tensors}
        self.dtypes[name] = dtypes.pop() if len(dtypes) == 1 else np.dtype(np.float32)
