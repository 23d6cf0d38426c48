"""Which Hugging Face tensor holds which parameter, and how it is laid out there.

A Hugging Face matrix is [out, in] with heads flattened into one dimension, one tensor a layer.
A parameter here is [in, out] with heads and head dims apart, stacked over the layers. `Layout`
says which dimensions of the parameter each dimension of the tensor is made of:

    q_proj.kernel [L, E, H, D]  <->  model.layers.{i}.self_attn.q_proj.weight [H * D, E]
    groups ((1, 2), (0,)): rows run over dims 1 and 2 (H, D), columns over dim 0 (E)
"""

import dataclasses
import math
from typing import Any

import numpy as np

Path = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    """One parameter's tensor(s): `name` holds `{i}` where there is one tensor a layer."""

    name: str
    groups: tuple[tuple[int, ...], ...]

    @property
    def stacked(self) -> bool:
        """Whether the parameter is stacked over the layers, one tensor each."""
        return "{i}" in self.name

    def tensor_name(self, layer: int) -> str:
        """Name of the tensor of a layer (the layer is ignored where there is but one)."""
        return self.name.replace("{i}", str(layer))

    def tensor_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the tensor that holds a parameter of `shape` (without its layer axis)."""
        return tuple(math.prod(shape[dim] for dim in group) for group in self.groups)

    def tensor_slices(
        self, shape: tuple[int, ...], index: tuple[slice, ...]
    ) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Split a slice of the parameter into one of the tensor and the rest.

        Only the leading dimension of a group can be cut in the file, because the others lie
        between its entries; what is left is cut after reading.

        Returns:
            slices of the tensor's dimensions, and slices of the parameter as read.
        """
        cut, rest = [], list(index)
        for group in self.groups:
            stride = math.prod(shape[dim] for dim in group[1:])
            start, stop, _ = index[group[0]].indices(shape[group[0]])
            cut.append(slice(start * stride, stop * stride))
            rest[group[0]] = slice(None)
        return tuple(cut), tuple(rest)

    def to_parameter(self, tensor: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Lay a tensor (or a slice of its leading dims) out as the parameter of `shape`."""
        order = [dim for group in self.groups for dim in group]
        split = []
        for size, group in zip(tensor.shape, self.groups, strict=True):
            inner = [shape[dim] for dim in group[1:]]
            split += [size // math.prod(inner), *inner]
        back = np.argsort(order)
        if self._is_transpose:
            return _transpose(tensor).reshape([split[dim] for dim in back])
        return tensor.reshape(split).transpose(back)

    def to_tensor(self, parameter: np.ndarray) -> np.ndarray:
        """Lay a parameter (without its layer axis) out as the tensor."""
        order = [dim for group in self.groups for dim in group]
        shape = self.tensor_shape(parameter.shape)
        if self._is_transpose:
            return _transpose(parameter.reshape(shape[::-1]))
        return np.ascontiguousarray(parameter.transpose(order).reshape(shape))

    @property
    def _is_transpose(self) -> bool:
        """Whether the tensor is the transpose of the parameter seen as a matrix."""
        if len(self.groups) != 2:
            return False
        dims = (*self.groups[1], *self.groups[0])
        return dims == tuple(range(len(dims)))


def _transpose(matrix: np.ndarray) -> np.ndarray:
    """Transpose into new memory, some rows at a time: three times as fast as all at once."""
    out = np.empty(matrix.shape[::-1], matrix.dtype)
    for start in range(0, matrix.shape[0], 64):
        out[:, start : start + 64] = matrix[start : start + 64].T
    return out


_VECTOR = ((0,),)
_AS_IS = ((0,), (1,))
_TRANSPOSED = ((1,), (0,))
_LAYER = "model.layers.{i}."
_ATTENTION = _LAYER + "self_attn."

LAYOUTS: dict[Path, Layout] = {
    ("embedding",): Layout("model.embed_tokens.weight", _AS_IS),
    ("final_norm", "scale"): Layout("model.norm.weight", _VECTOR),
    ("lm_head",): Layout("lm_head.weight", _TRANSPOSED),
    ("layers", "attention_norm", "scale"): Layout(_LAYER + "input_layernorm.weight", _VECTOR),
    ("layers", "mlp_norm", "scale"): Layout(_LAYER + "post_attention_layernorm.weight", _VECTOR),
    ("layers", "attention", "o_proj", "kernel"): Layout(
        _ATTENTION + "o_proj.weight", ((2,), (0, 1))
    ),
    ("layers", "attention", "o_proj", "bias"): Layout(_ATTENTION + "o_proj.bias", _VECTOR),
    # NVIDIA's names for the head that makes DMS decisions from the residual stream.
    ("layers", "adapter", "norm", "scale"): Layout(
        _ATTENTION + "dms_proj_alpha_norm.weight", _VECTOR
    ),
    ("layers", "adapter", "proj", "kernel"): Layout(
        _ATTENTION + "dms_proj_alpha.weight", _TRANSPOSED
    ),
    ("layers", "adapter", "proj", "bias"): Layout(_ATTENTION + "dms_proj_alpha.bias", _VECTOR),
}
for _name in ("q_proj", "k_proj", "v_proj"):
    LAYOUTS["layers", "attention", _name, "kernel"] = Layout(
        f"{_ATTENTION}{_name}.weight", ((1, 2), (0,))
    )
    LAYOUTS["layers", "attention", _name, "bias"] = Layout(f"{_ATTENTION}{_name}.bias", ((0, 1),))
for _name in ("q_norm", "k_norm"):
    LAYOUTS["layers", "attention", _name, "scale"] = Layout(f"{_ATTENTION}{_name}.weight", _VECTOR)
for _name in ("gate_proj", "up_proj", "down_proj"):
    LAYOUTS["layers", "mlp", _name, "kernel"] = Layout(f"{_LAYER}mlp.{_name}.weight", _TRANSPOSED)
    LAYOUTS["layers", "mlp", _name, "bias"] = Layout(f"{_LAYER}mlp.{_name}.bias", _VECTOR)

LM_HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
ADAPTER_MARK = ".self_attn.dms_proj_alpha"


def is_derived(name: str) -> bool:
    """Whether a tensor only repeats what the config says (rotary tables of old checkpoints)."""
    return name.endswith(".rotary_emb.inv_freq")
