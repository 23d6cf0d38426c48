"""The Hugging Face tensor of each parameter, and its layout in the file.

A Hugging Face matrix is [out, in] with heads flattened into one dimension, one tensor per layer.
A parameter here is [in, out] with separate dimensions for heads and head dims, stacked over the
layers. `Layout` lists which dimensions of the parameter make up each dimension of the tensor:

    o_proj.kernel [L, H, D, E]  <->  model.layers.{i}.self_attn.o_proj.weight [E, H * D]
    groups ((2,), (0, 1)): rows run over dim 2 (E), columns over dims 0 and 1 (H, D)

A parameter may consist of several tensors; a `Piece` is one of them:

    qkv_proj.kernel [L, E, K, G + 2, D]: q_proj is [:, :, :, :-2], k_proj [-2:-1], v_proj [-1:]

and if a family stores such pieces concatenated in one tensor (Phi), that is `Joined`.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping

import numpy as np

from dms_jax.config import ModelConfig
from dms_jax.model.parameters import Path
from dms_jax.policies.values import AdapterShape


@dataclasses.dataclass(frozen=True)
class Layout:
    """The tensor(s) of a parameter; `name` contains `{i}` if there is one tensor per layer."""

    name: str
    groups: tuple[tuple[int, ...], ...]

    @property
    def stacked(self) -> bool:
        """Whether the parameter stacks one tensor per layer."""
        return "{i}" in self.name

    def tensor_name(self, layer: int) -> str:
        """Name of the tensor of a layer (ignored if there is only one tensor)."""
        return self.name.replace("{i}", str(layer))

    def tensor_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the tensor for a parameter of `shape` (without its layer axis)."""
        return tuple(math.prod(shape[dim] for dim in group) for group in self.groups)

    def split_axis(self, shape: tuple[int, ...]) -> int | None:
        """The dimension of the parameter to split for reads of consecutive rows of the tensor."""
        return self.groups[0][_leading(self.groups[0], shape)]

    def tensor_slices(
        self, shape: tuple[int, ...], index: tuple[slice, ...]
    ) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Splits a slice of the parameter into slices of the tensor and slices of the result.

        Only the leading dimension of a group (the first longer than one) can be sliced in the file,
        because its entries are contiguous there; the other dimensions are sliced after reading.

        Returns:
            slices of the tensor's dimensions, and slices to take from the result of that read.
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
        """Rearranges a tensor (or a slice of its leading dims) into the parameter of `shape`."""
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
        """Rearranges a parameter (without its layer axis) into the tensor."""
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
    """The part of a parameter that one tensor fills: slices of its non-layer axes, or all."""

    layout: Layout
    part: tuple[tuple[int, slice], ...] = ()

    def index(self, ndim: int) -> tuple[slice, ...]:
        """The index of the piece in a parameter of `ndim` dimensions."""
        part = dict(self.part)
        return tuple(part.get(dim, slice(None)) for dim in range(ndim))

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the piece of a parameter of `shape`."""
        return tuple(
            len(range(*cut.indices(size)))
            for cut, size in zip(self.index(len(shape)), shape, strict=True)
        )

    def within(
        self, index: tuple[slice, ...], shape: tuple[int, ...]
    ) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
        """Intersects the piece with a part of a parameter; returns the overlap's slices in each.

            # In: expert 3 of 4, a part of experts 2 and 3  Out: (1:2,), (0:1,)

        None if they do not overlap.

        Args:
            index: the part.
            shape: shape of the parameter.
        """
        there, own = [], []
        for mine, cut, size in zip(self.index(len(shape)), index, shape, strict=True):
            (first, end, _), (start, stop, _) = mine.indices(size), cut.indices(size)
            low, high = max(first, start), min(end, stop)
            if low >= high:
                return None
            there.append(slice(low - start, high - start))
            own.append(slice(low - first, high - first))
        return tuple(there), tuple(own)


@dataclasses.dataclass(frozen=True)
class Joined(Layout):
    """A tensor with all pieces of a parameter, concatenated along its first dimension."""

    groups: tuple[tuple[int, ...], ...] = ()
    pieces: tuple[Piece, ...] = ()

    def tensor_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        shapes = [piece.layout.tensor_shape(piece.shape(shape)) for piece in self.pieces]
        return (sum(each[0] for each in shapes), *shapes[0][1:])

    def split_axis(self, shape: tuple[int, ...]) -> int | None:
        """None: a part is read as the whole tensor."""
        return None

    def tensor_slices(
        self, shape: tuple[int, ...], index: tuple[slice, ...]
    ) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        return tuple(slice(0, size) for size in self.tensor_shape(shape)), index

    def to_parameter(self, tensor: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        out, start = np.empty(shape, tensor.dtype), 0
        for piece in self.pieces:
            own = piece.shape(shape)
            end = start + piece.layout.tensor_shape(own)[0]
            out[piece.index(len(shape))] = piece.layout.to_parameter(tensor[start:end], own)
            start = end
        return out

    def to_tensor(self, parameter: np.ndarray) -> np.ndarray:
        cut = [(piece, parameter[piece.index(parameter.ndim)]) for piece in self.pieces]
        return np.concatenate([piece.layout.to_tensor(part) for piece, part in cut])


def _transpose(matrix: np.ndarray) -> np.ndarray:
    """Transposes into new memory in blocks of rows: three times as fast as in one step."""
    out = np.empty(matrix.shape[::-1], matrix.dtype)
    for start in range(0, matrix.shape[0], 64):
        out[:, start : start + 64] = matrix[start : start + 64].T
    return out


_VECTOR = ((0,),)
_AS_IS = ((0,), (1,))
_TRANSPOSED = ((1,), (0,))
_LAYER = "model.layers.{i}."
_ATTENTION = _LAYER + "self_attn."
_MLP = _LAYER + "mlp."
# NVIDIA's names for the head that computes DMS decisions from the residual stream (the adapter).
_DMS = _ATTENTION + "dms_proj_alpha"

Pieces = Mapping[Path, tuple[Piece, ...]]


def _one(name: str, groups: tuple[tuple[int, ...], ...]) -> tuple[Piece, ...]:
    return (Piece(Layout(name, groups)),)


_ALL_MODELS: Pieces = {
    ("embedding",): _one("model.embed_tokens.weight", _AS_IS),
    ("final_norm", "scale"): _one("model.norm.weight", _VECTOR),
    ("lm_head",): _one("lm_head.weight", _TRANSPOSED),
    ("layers", "attention", "o_proj", "kernel"): _one(_ATTENTION + "o_proj.weight", ((2,), (0, 1))),
    ("layers", "attention", "o_proj", "bias"): _one(_ATTENTION + "o_proj.bias", _VECTOR),
    ("layers", "attention", "sinks"): _one(_ATTENTION + "sinks", ((0, 1),)),
    ("layers", "adapter", "norm", "scale"): _one(_DMS + "_norm.weight", _VECTOR),
    ("layers", "adapter", "proj", "kernel"): _one(_DMS + ".weight", _TRANSPOSED),
    ("layers", "adapter", "proj", "bias"): _one(_DMS + ".bias", _VECTOR),
    # Ours: the hidden units of an adapter of two layers, and its second output.
    ("layers", "adapter", "hidden", "kernel"): _one(_DMS + "_hidden.weight", _TRANSPOSED),
    ("layers", "adapter", "hidden", "bias"): _one(_DMS + "_hidden.bias", _VECTOR),
    ("layers", "adapter", "late", "kernel"): _one(_DMS + "_late.weight", _TRANSPOSED),
}
# The factors of low-rank updates, under PEFT's names: matrices [r, in] and [out, r].
_LOW_RANK: Pieces = {
    ("layers", "attention", projection, part, f"lora_{factor.lower()}"): _one(
        f"{_ATTENTION}{part}_proj.lora_{factor}.weight", groups
    )
    for projection, parts, a, b in (
        ("qkv_proj", "qkv", _TRANSPOSED, ((1, 2, 3), (0,))),
        ("o_proj", "o", ((2,), (0, 1)), _TRANSPOSED),
    )
    for part in parts
    for factor, groups in (("A", a), ("B", b))
}
# The names of norms before and after attention and feed-forward.
_NORMS = {
    "pre": {"attention_norm": "input", "mlp_norm": "post_attention"},
    "post": {"attention_post_norm": "post_attention", "mlp_post_norm": "post_feedforward"},
    "both": {
        "attention_norm": "input",
        "attention_post_norm": "post_attention",
        "mlp_norm": "pre_feedforward",
        "mlp_post_norm": "post_feedforward",
    },
}
# Kernel [E, K, G + 2, D] and bias [K, G + 2, D]: the query heads of each group, its key, its value.
_QKV = (("q_proj", slice(0, -2)), ("k_proj", slice(-2, -1)), ("v_proj", slice(-1, None)))
# Kernel [E, 2, F] and bias [2, F]: the gate projection, then the up projection.
_GATE_UP = (("gate_proj", slice(0, 1)), ("up_proj", slice(1, 2)))


@functools.cache
def pieces_of(config: ModelConfig, each_expert: bool = False) -> Pieces:
    """Returns the tensors of all possible parameters of the config's family.

    Args:
      config: the model's shape.
      each_expert: whether each expert of a gpt-oss has its own tensors, as from GGUF files.
    """
    found = {**_ALL_MODELS, **_LOW_RANK}
    for norm, name in _NORMS[config.norms].items():
        found["layers", norm, "scale"] = _one(f"{_LAYER}{name}_layernorm.weight", _VECTOR)
    over = {"head": (_VECTOR, _VECTOR), "heads": (((0, 1, 2),), ((0, 1),))}[config.qk_norm_over]
    for name, groups in zip(("q_norm", "k_norm"), over, strict=True):
        found["layers", "attention", name, "scale"] = _one(f"{_ATTENTION}{name}.weight", groups)
    qkv = ("layers", "attention", "qkv_proj")
    found[*qkv, "kernel"] = tuple(
        Piece(Layout(f"{_ATTENTION}{name}.weight", ((1, 2, 3), (0,))), ((2, part),))
        for name, part in _QKV
    )
    found[*qkv, "bias"] = tuple(
        Piece(Layout(f"{_ATTENTION}{name}.bias", ((0, 1, 2),)), ((1, part),)) for name, part in _QKV
    )
    found |= _dense_mlp(config) if config.experts is None else _experts(config, each_expert)
    if config.model_type == "phi3":
        for module, name in (("attention", "qkv_proj"), ("mlp", "gate_up_proj")):
            where = {"attention": _ATTENTION, "mlp": _MLP}[module]
            path = ("layers", module, name, "kernel")
            found[path] = (Piece(Joined(f"{where}{name}.weight", pieces=found[path])),)
    return found


def _dense_mlp(config: ModelConfig) -> Pieces:
    gate_up, down = ("layers", "mlp", "gate_up_proj"), ("layers", "mlp", "down_proj")
    return {
        (*gate_up, "kernel"): tuple(
            Piece(Layout(f"{_MLP}{name}.weight", ((1, 2), (0,))), ((1, part),))
            for name, part in _GATE_UP
        ),
        (*gate_up, "bias"): tuple(
            Piece(Layout(f"{_MLP}{name}.bias", ((0, 1),)), ((0, part),)) for name, part in _GATE_UP
        ),
        (*down, "kernel"): _one(_MLP + "down_proj.weight", _TRANSPOSED),
        (*down, "bias"): _one(_MLP + "down_proj.bias", _VECTOR),
    }


def _experts(config: ModelConfig, each_expert: bool) -> Pieces:
    """Kernels [X, E, 2, F] and [X, F, E] of all experts: one tensor each, or one per expert."""
    assert config.experts is not None
    router, gate_up, down = (
        ("layers", "mlp", name) for name in ("router", "gate_up_proj", "down_proj")
    )
    gpt_oss = config.model_type == "gpt_oss"
    routers: Pieces = {
        (*router, "kernel"): _one(f"{_MLP}{'router' if gpt_oss else 'gate'}.weight", _TRANSPOSED),
        (*router, "bias"): _one(_MLP + "router.bias", _VECTOR),
    }
    if gpt_oss and not each_expert:  # gate and up alternate along the last dimension
        return {
            **routers,
            (*gate_up, "kernel"): _one(_MLP + "experts.gate_up_proj", ((0,), (1,), (3, 2))),
            (*gate_up, "bias"): _one(_MLP + "experts.gate_up_proj_bias", ((0,), (2, 1))),
            (*down, "kernel"): _one(_MLP + "experts.down_proj", ((0,), (1,), (2,))),
            (*down, "bias"): _one(_MLP + "experts.down_proj_bias", _AS_IS),
        }
    each = [(j, (0, slice(j, j + 1))) for j in range(config.experts.count)]
    return {
        **routers,
        (*gate_up, "kernel"): tuple(
            Piece(Layout(f"{_MLP}experts.{j}.{name}.weight", ((0, 2, 3), (1,))), (own, (2, part)))
            for j, own in each
            for name, part in _GATE_UP
        ),
        (*down, "kernel"): tuple(
            Piece(Layout(f"{_MLP}experts.{j}.down_proj.weight", ((2,), (0, 1))), (own,))
            for j, own in each
        ),
        (*gate_up, "bias"): tuple(
            Piece(Layout(f"{_MLP}experts.{j}.{name}.bias", ((0, 1, 2),)), (own, (1, part)))
            for j, own in each
            for name, part in _GATE_UP
        ),
        (*down, "bias"): tuple(
            Piece(Layout(f"{_MLP}experts.{j}.down_proj.bias", ((0, 1),)), (own,)) for j, own in each
        ),
    }


LM_HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
ADAPTER_MARK = ".self_attn.dms_proj_alpha"


def adapter_shape(shapes: Mapping[str, tuple[int, ...]], *, qkv_bias: bool) -> AdapterShape | None:
    """Returns the shape of the adapter in a checkpoint's tensors; None without one.

    A linear adapter has biases if the model's projections have them.
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


def tensor_shapes(pieces: tuple[Piece, ...], shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the tensors of a parameter, of all its layers."""
    found = {}
    for piece in pieces:
        layout = piece.layout
        own = layout.tensor_shape(piece.shape(shape[1:] if layout.stacked else shape))
        for layer in range(shape[0] if layout.stacked else 1):
            found[layout.tensor_name(layer)] = own
    return found


def is_low_rank(name: str) -> bool:
    """Whether a tensor is a factor of a low-rank update."""
    return name.endswith((".lora_A.weight", ".lora_B.weight"))


def is_adapter(pieces: tuple[Piece, ...]) -> bool:
    """Whether a parameter belongs to the DMS decision head."""
    return ADAPTER_MARK in pieces[0].layout.name


def is_derived(name: str) -> bool:
    """Whether a tensor can be computed from the config (rotary tables of old checkpoints)."""
    return name.endswith(".rotary_emb.inv_freq")
