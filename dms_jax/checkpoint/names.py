"""The Hugging Face tensor of each parameter, and its layout there.

A Hugging Face matrix is [out, in] with heads flattened into one dimension, one tensor a layer.
A parameter here is [in, out] with separate dimensions for heads and head dims, stacked over the
layers. `Layout` lists which dimensions of the parameter make up each dimension of the tensor:

    o_proj.kernel [L, H, D, E]  <->  model.layers.{i}.self_attn.o_proj.weight [E, H * D]
    groups ((2,), (0, 1)): rows run over dim 2 (E), columns over dims 0 and 1 (H, D)

A parameter may concatenate several tensors along one axis; a `Piece` is one of them:

    qkv_proj.kernel [L, E, K, G + 2, D]: q_proj is [:, :, :, :-2], k_proj [-2:-1], v_proj [-1:]
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from dms_jax.policies.values import AdapterShape

Path = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    """The tensor(s) of a parameter: `name` contains `{i}` if there is one tensor for each layer."""

    name: str
    groups: tuple[tuple[int, ...], ...]

    @property
    def stacked(self) -> bool:
        """Whether the parameter stacks one tensor for each layer."""
        return "{i}" in self.name

    def tensor_name(self, layer: int) -> str:
        """Name of the tensor of a layer (the layer is ignored if there is only one tensor)."""
        return self.name.replace("{i}", str(layer))

    def tensor_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the tensor for a parameter of `shape` (without its layer axis)."""
        return tuple(math.prod(shape[dim] for dim in group) for group in self.groups)

    def tensor_slices(
        self, shape: tuple[int, ...], index: tuple[slice, ...]
    ) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Split a slice of the parameter into slices of the tensor and slices of what is read.

        Only the leading dimension of a group (the first longer than one) can be sliced in the file,
        because its entries are contiguous there; the other dimensions are sliced after reading.

        Returns:
            slices of the tensor's dimensions, and slices of the parameter as it was read.
        """
        cut, rest = [], list(index)
        for group in self.groups:
            lead = _leading(group, shape)
            stride = math.prod(shape[dim] for dim in group[lead + 1 :])
            start, stop, _ = index[group[lead]].indices(shape[group[lead]])
            cut.append(slice(start * stride, stop * stride))
            rest[group[lead]] = slice(None)
        return tuple(cut), tuple(rest)

    def to_parameter(self, tensor: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Rearrange a tensor (or a slice of its leading dims) into the parameter of `shape`."""
        order = [dim for group in self.groups for dim in group]
        split = []
        for size, group in zip(tensor.shape, self.groups, strict=True):
            lead = _leading(group, shape)
            inner = [shape[dim] for dim in group[lead + 1 :]]
            split += [1] * lead + [size // math.prod(inner), *inner]
        back = np.argsort(order)
        if self._is_transpose:
            return _transpose(tensor).reshape([split[dim] for dim in back])
        return tensor.reshape(split).transpose(back)

    def to_tensor(self, parameter: np.ndarray) -> np.ndarray:
        """Rearrange a parameter (without its layer axis) into the tensor."""
        order = [dim for group in self.groups for dim in group]
        shape = self.tensor_shape(parameter.shape)
        if self._is_transpose:
            return _transpose(parameter.reshape(shape[::-1]))
        return np.ascontiguousarray(parameter.transpose(order).reshape(shape))

    @property
    def _is_transpose(self) -> bool:
        """Whether the tensor is the transpose of the parameter, viewed as a matrix."""
        if len(self.groups) != 2:
            return False
        dims = (*self.groups[1], *self.groups[0])
        return dims == tuple(range(len(dims)))


def _leading(group: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """Index in a group of its first dimension longer than one (0 if there is none)."""
    return next((place for place, dim in enumerate(group) if shape[dim] > 1), 0)


@dataclasses.dataclass(frozen=True)
class Piece:
    """The part of a parameter that one tensor fills: `part` of `axis` (not of layers), or all."""

    layout: Layout
    axis: int | None = None
    part: slice = slice(None)

    def index(self, ndim: int) -> tuple[slice, ...]:
        """The index of the piece in a parameter of `ndim` dimensions."""
        return tuple(self.part if dim == self.axis else slice(None) for dim in range(ndim))

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the piece of a parameter of `shape`."""
        return tuple(
            len(range(*cut.indices(size)))
            for cut, size in zip(self.index(len(shape)), shape, strict=True)
        )


def _transpose(matrix: np.ndarray) -> np.ndarray:
    """Transpose into new memory in blocks of rows: three times as fast as in one step."""
    out = np.empty(matrix.shape[::-1], matrix.dtype)
    for start in range(0, matrix.shape[0], 64):
        out[:, start : start + 64] = matrix[start : start + 64].T
    return out


_VECTOR = ((0,),)
_AS_IS = ((0,), (1,))
_TRANSPOSED = ((1,), (0,))
_LAYER = "model.layers.{i}."
_ATTENTION = _LAYER + "self_attn."

PIECES: dict[Path, tuple[Piece, ...]] = {}


def _tensor(path: Path, name: str, groups: tuple[tuple[int, ...], ...]) -> None:
    PIECES[path] = (Piece(Layout(name, groups)),)


_tensor(("embedding",), "model.embed_tokens.weight", _AS_IS)
_tensor(("final_norm", "scale"), "model.norm.weight", _VECTOR)
_tensor(("lm_head",), "lm_head.weight", _TRANSPOSED)
_tensor(("layers", "attention_norm", "scale"), _LAYER + "input_layernorm.weight", _VECTOR)
_tensor(("layers", "mlp_norm", "scale"), _LAYER + "post_attention_layernorm.weight", _VECTOR)
for _name in ("q_norm", "k_norm"):
    _tensor(("layers", "attention", _name, "scale"), f"{_ATTENTION}{_name}.weight", _VECTOR)
_tensor(("layers", "attention", "o_proj", "kernel"), _ATTENTION + "o_proj.weight", ((2,), (0, 1)))
_tensor(("layers", "attention", "o_proj", "bias"), _ATTENTION + "o_proj.bias", _VECTOR)
_tensor(("layers", "mlp", "down_proj", "kernel"), _LAYER + "mlp.down_proj.weight", _TRANSPOSED)
_tensor(("layers", "mlp", "down_proj", "bias"), _LAYER + "mlp.down_proj.bias", _VECTOR)
# NVIDIA's names for the head that makes DMS decisions from the residual stream (the adapter).
_DMS = _ATTENTION + "dms_proj_alpha"
_tensor(("layers", "adapter", "norm", "scale"), _DMS + "_norm.weight", _VECTOR)
_tensor(("layers", "adapter", "proj", "kernel"), _DMS + ".weight", _TRANSPOSED)
_tensor(("layers", "adapter", "proj", "bias"), _DMS + ".bias", _VECTOR)
# Ours: the hidden units of an adapter of two layers, and its second output.
_tensor(("layers", "adapter", "hidden", "kernel"), _DMS + "_hidden.weight", _TRANSPOSED)
_tensor(("layers", "adapter", "hidden", "bias"), _DMS + "_hidden.bias", _VECTOR)
_tensor(("layers", "adapter", "late", "kernel"), _DMS + "_late.weight", _TRANSPOSED)

# Kernel [E, K, G + 2, D] and bias [K, G + 2, D]: the query heads of each group, its key, its value.
_QKV = (("q_proj", slice(0, -2)), ("k_proj", slice(-2, -1)), ("v_proj", slice(-1, None)))
PIECES["layers", "attention", "qkv_proj", "kernel"] = tuple(
    Piece(Layout(f"{_ATTENTION}{name}.weight", ((1, 2, 3), (0,))), 2, part) for name, part in _QKV
)
PIECES["layers", "attention", "qkv_proj", "bias"] = tuple(
    Piece(Layout(f"{_ATTENTION}{name}.bias", ((0, 1, 2),)), 1, part) for name, part in _QKV
)
# Kernel [E, 2, F] and bias [2, F]: the gate projection, then the up projection.
_GATE_UP = (("gate_proj", slice(0, 1)), ("up_proj", slice(1, 2)))
PIECES["layers", "mlp", "gate_up_proj", "kernel"] = tuple(
    Piece(Layout(f"{_LAYER}mlp.{name}.weight", ((1, 2), (0,))), 1, part) for name, part in _GATE_UP
)
PIECES["layers", "mlp", "gate_up_proj", "bias"] = tuple(
    Piece(Layout(f"{_LAYER}mlp.{name}.bias", ((0, 1),)), 0, part) for name, part in _GATE_UP
)

LM_HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
ADAPTER_MARK = ".self_attn.dms_proj_alpha"


def adapter_shape(shapes: Mapping[str, tuple[int, ...]], *, qkv_bias: bool) -> AdapterShape | None:
    """Returns the shape of the adapter that a checkpoint's tensors make up; None for none.

    The biases of a linear adapter are taken for those of a model whose projections have some.
    """
    if not any(ADAPTER_MARK in name for name in shapes):
        return None
    hidden = (
        shape[0]
        for name, shape in shapes.items()
        if name.endswith(f"{ADAPTER_MARK}_hidden.bias") and len(shape) == 1
    )
    late = any(name.endswith(f"{ADAPTER_MARK}_late.weight") for name in shapes)
    bias = any(name.endswith(f"{ADAPTER_MARK}.bias") for name in shapes)
    units = next(hidden, 0)
    return AdapterShape(
        hidden=units, bias=bias and (bool(units) or late or not qkv_bias), late=late
    )


def is_adapter(pieces: tuple[Piece, ...]) -> bool:
    """Whether a parameter belongs to the head that makes DMS decisions."""
    return ADAPTER_MARK in pieces[0].layout.name


def is_derived(name: str) -> bool:
    """Whether a tensor can be computed from the config (rotary tables of old checkpoints)."""
    return name.endswith(".rotary_emb.inv_freq")
