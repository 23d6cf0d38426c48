"""The tensors of a GGUF model under their Hugging Face names, dequantised as they are read.

In files of the architecture llama, the rows of each query and key head are interleaved, because
llama.cpp rotates adjacent rows where Hugging Face rotates the two halves of a head.

    Hugging Face rows of a head of 8:  0 1 2 3 4 5 6 7  (i is rotated with i + 4)
    the same rows in the file:         0 4 1 5 2 6 3 7  (2 i is rotated with 2 i + 1)

In files of gemma3 norms hold the full multiplier, 1 + the Hugging Face weight.

The matrices of all experts are one tensor, ffn_gate_exps [X, F, E]; each becomes a separate tensor.

The package `gguf` dequantises tensors in blocks of rows, directly into the requested type.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

from dms_jax.checkpoint import names
from dms_jax.checkpoint.gguf.file import GgufFiles, TensorInfo
from dms_jax.checkpoint.weights import Tensors
from dms_jax.errors import CheckpointError, plain
from dms_jax.extras import import_extra

ROPE_FACTORS = "rope_freqs.weight"

_BLOCK = "blk.{i}."
_LAYER = "model.layers.{i}."
_WHOLE = {
    "token_embd.weight": names.EMBEDDING,
    "output_norm.weight": "model.norm.weight",
    "output.weight": names.LM_HEAD,
}
_OF_LAYERS = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
} | {
    f"{ours}.{part}": f"{theirs}.{part}"
    for part in ("weight", "bias")
    for ours, theirs in {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }.items()
}
_EXPERTS = {
    f"ffn_{name}_exps.{part}": f"mlp.experts.{{j}}.{name}_proj.{part}"
    for part in ("weight", "bias")
    for name in ("gate", "up", "down")
}
# Tensors that an architecture names differently, or that only it has.
_OWN = {
    "gemma3": {
        "post_attention_norm.weight": "post_attention_layernorm.weight",
        "ffn_norm.weight": "pre_feedforward_layernorm.weight",
        "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
    },
    "qwen3moe": {"ffn_gate_inp.weight": "mlp.gate.weight"} | _EXPERTS,
    "gpt-oss": {
        "post_attention_norm.weight": "post_attention_layernorm.weight",
        "attn_sinks.weight": "self_attn.sinks",
        "ffn_gate_inp.weight": "mlp.router.weight",
        "ffn_gate_inp.bias": "mlp.router.bias",
    }
    | _EXPERTS,
}
_LAYER_TENSOR = re.compile(r"blk\.(0|[1-9]\d{0,6})\.(.+)")
_EXPERT = re.compile(r"experts\.\d+\.")
_INTERLEAVED = re.compile(r"\.self_attn\.([qk])_proj\.(weight|bias)$")

# Unquantised types.
_PLAIN = {
    0: np.dtype(np.float32),
    1: np.dtype(np.float16),
    28: np.dtype(np.float64),
    30: np.dtype(ml_dtypes.bfloat16),
}
_TERNARY = ("TQ1_0", "TQ2_0")
_INTEGERS = ("I8", "I16", "I32", "I64")

_MAX_EXPERTS = 4096
_CHUNK = 2**18  # elements to dequantise at a time: temporaries fit the cache of a core


class GgufWeights(Tensors):
    """Tensors by their Hugging Face names, read lazily.

    Attributes:
        shapes: shape of every tensor.
        dtypes: type of every tensor; float32 for all if one of them is quantised.
        config_name: the source of the model's shape, for messages.

    Raises:
        CheckpointError: a tensor is unknown, of an unsupported type, or cut short.
    """

    def __init__(self, files: GgufFiles, architecture: str):
        self._of_layers = _OF_LAYERS | _OWN.get(architecture, {})
        self._norms_add_one = architecture == "gemma3"
        self.config_name = f"the metadata of {files.name}"
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, np.dtype] = {}
        self._package = import_extra(
            "gguf", extra="gguf", purpose="Reading a GGUF file", error=CheckpointError
        )
        self._infos: dict[str, TensorInfo] = {}
        self._stored: dict[str, str] = {}
        self._interleaved_heads: dict[str, int] = {}
        self._rope_factors: tuple[str, TensorInfo] | None = None
        quantized = False
        unknown = []
        for stored, info in files.tensors.items():
            name = hugging_face_name(stored, self._of_layers)
            if stored == ROPE_FACTORS:
                self._rope_factors = stored, info
            elif name is None:
                unknown.append(stored)
                continue
            self._check(stored, info)
            quantized |= info.kind not in _PLAIN
            for each, part in () if name is None else self._parts(name, stored, info):
                self.shapes[each] = part.shape
                self._infos[each] = part
                self._stored[each] = stored
        if unknown:
            raise _unknown(files.name, unknown)
        for name, info in self._infos.items():
            self.dtypes[name] = np.dtype(np.float32) if quantized else _PLAIN[info.kind]

    def read(self, name: str, index: tuple[slice, ...] = (), dtype: Any = None) -> np.ndarray:
        dtype = self.dtypes[name] if dtype is None else np.dtype(dtype)
        stored, info = self._stored[name], self._infos[name]
        index = index or (slice(None),) * len(info.shape)
        order = self._order(name, info.shape[0])
        if len(info.shape) == 1:
            added = self._norms_add_one and name.endswith("norm.weight")
            kept = np.promote_types(dtype, np.float32) if added else dtype
            vector = self._rows(stored, info, slice(0, 1), slice(None), kept)[0]
            if added:
                vector = (vector - 1).astype(dtype)
            return (vector if order is None else vector[order])[index[0]]
        rows = range(info.shape[0])[index[0]]
        if order is None or not rows:
            return self._rows(stored, info, slice(rows.start, rows.stop), index[1], dtype)
        # Read the range that holds all chosen rows, then pick them in order.
        chosen = order[rows.start : rows.stop]
        first, last = int(chosen.min()), int(chosen.max()) + 1
        tensor = self._rows(stored, info, slice(first, last), index[1], dtype)
        return tensor[chosen - first]

    def interleaved(self, num_heads: int, num_kv_heads: int) -> None:
        """Declares that the file interleaves the rows of these query and key heads."""
        self._interleaved_heads = {"q": num_heads, "k": num_kv_heads}

    def file_name(self, name: str) -> str:
        return self._infos[name].file.path.name

    def stored_name(self, name: str) -> str:
        if name in self._stored:
            return self._stored[name]
        return gguf_name(name, self._of_layers)

    def has(self, suffix: str) -> bool:
        """Whether the first layer has a tensor with this suffix."""
        return f"{_LAYER.replace('{i}', '0')}{suffix}" in self.shapes

    def rope_factors(self) -> np.ndarray | None:
        """The divisors of rotary frequencies; None without any."""
        if self._rope_factors is None:
            return None
        stored, info = self._rope_factors
        factors = self._rows(stored, info, slice(0, 1), slice(None), np.dtype(np.float64))[0]
        if not np.isfinite(factors).all() or (factors < 1).any():
            raise CheckpointError(
                f"{info.file.path.name}: {stored} holds numbers below 1 or NaN, by which no "
                "frequency is divided"
            )
        return factors

    def _check(self, stored: str, info: TensorInfo) -> None:
        """Raises CheckpointError if a tensor's type is unsupported, or its data are cut short."""
        where = f"{info.file.path.name}: tensor {plain(stored)}"
        if info.kind not in _PLAIN:
            try:
                kind = self._package.GGMLQuantizationType(info.kind)
            except ValueError as error:
                raise CheckpointError(
                    f"{where} has type {info.kind}, which the package gguf does not know; load a "
                    "GGUF that is quantised as llama.cpp does, or update the package"
                ) from error
            if kind.name in _TERNARY or kind.name in _INTEGERS:
                what = "ternary weights" if kind.name in _TERNARY else "integers"
                raise CheckpointError(f"{where} holds {kind.name} ({what}): not supported")
            block, size = self._package.GGML_QUANT_SIZES[kind]
            if info.shape[-1] % block:
                raise CheckpointError(
                    f"{where} has rows of {info.shape[-1]} numbers, which blocks of {block} "
                    f"({kind.name}) do not divide: the file is damaged"
                )
            try:
                with np.errstate(all="ignore"):
                    self._package.quants.dequantize(np.zeros((1, size), np.uint8), kind)
            except NotImplementedError as error:
                raise CheckpointError(
                    f"{where} is quantised as {kind.name}, which the package gguf cannot "
                    "dequantise; load another quantisation of the model"
                ) from error
        info.file.read(stored, info.offset, _row_bytes(self._package, info) * _num_rows(info))

    def _parts(self, name: str, stored: str, info: TensorInfo) -> Iterator[tuple[str, TensorInfo]]:
        """Yields the tensors in one tensor of the file: one, or one per expert."""
        if "{j}" not in name:
            yield name, info
            return
        if len(info.shape) < 2 or info.shape[0] > _MAX_EXPERTS:
            raise CheckpointError(
                f"{info.file.path.name}: tensor {plain(stored)} {plain(list(info.shape))} does not "
                f"stack those of experts, at most {_MAX_EXPERTS}"
            )
        part = dataclasses.replace(info, shape=info.shape[1:])
        size = _row_bytes(self._package, part) * _num_rows(part)
        for expert in range(info.shape[0]):
            offset = info.offset + expert * size
            yield name.replace("{j}", str(expert)), dataclasses.replace(part, offset=offset)

    def _rows(
        self, stored: str, info: TensorInfo, rows: slice, columns: slice, dtype: np.dtype
    ) -> np.ndarray:
        """Reads rows and columns of a tensor as `dtype`; a vector is one row."""
        size, count = _row_bytes(self._package, info), rows.stop - rows.start
        data = info.file.read(stored, info.offset + rows.start * size, count * size)
        data = data.reshape(count, size)
        with np.errstate(over="ignore", invalid="ignore"):
            if info.kind in _PLAIN:
                return data.view(_PLAIN[info.kind])[:, columns].astype(dtype)
            kind = self._package.GGMLQuantizationType(info.kind)
            block, block_bytes = self._package.GGML_QUANT_SIZES[kind]
            start, stop, _ = columns.indices(info.shape[-1])
            first, last = start // block, -(-stop // block)  # whole blocks
            data = data[:, first * block_bytes : last * block_bytes]
            out = np.empty((count, (last - first) * block), dtype)
            step = max(1, _CHUNK // max(1, out.shape[1]))
            for row in range(0, count, step):
                # As one row: the package computes 16 rows at a time, which is slow in threads.
                part = data[row : row + step].reshape(1, -1)
                found = self._package.quants.dequantize(part, kind)
                out[row : row + step] = found.reshape(-1, out.shape[1])
        return out[:, start - first * block : stop - first * block]

    def _order(self, name: str, size: int) -> np.ndarray | None:
        """The position of each row in the file; None if they are in order."""
        found = _INTERLEAVED.search(name)
        heads = self._interleaved_heads.get(found[1]) if found else None
        if heads is None or size % (2 * heads):  # a wrong shape is reported later
            return None
        return np.arange(size).reshape(heads, size // heads // 2, 2).swapaxes(1, 2).reshape(-1)


def hugging_face_name(stored: str, of_layers: Mapping[str, str]) -> str | None:
    """The Hugging Face name of a tensor, or None."""
    if stored in _WHOLE:
        return _WHOLE[stored]
    found = _LAYER_TENSOR.fullmatch(stored)
    if found is None or found[2] not in of_layers:
        return None
    return _LAYER.replace("{i}", found[1]) + of_layers[found[2]]


def gguf_name(name: str, of_layers: Mapping[str, str]) -> str:
    """The GGUF name of a tensor, or the name itself."""
    for stored, ours in _WHOLE.items():
        if ours == name:
            return stored
    found = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    for stored, ours in of_layers.items():
        if found and ours == _EXPERT.sub(r"experts.{j}.", found[2]):
            return _BLOCK.replace("{i}", found[1]) + stored
    return name


def _num_rows(info: TensorInfo) -> int:
    return int(np.prod(info.shape[:-1], dtype=object)) if len(info.shape) > 1 else 1


def _row_bytes(package: ModuleType, info: TensorInfo) -> int:
    if info.kind in _PLAIN:
        return info.shape[-1] * _PLAIN[info.kind].itemsize
    block, size = package.GGML_QUANT_SIZES[package.GGMLQuantizationType(info.kind)]
    return info.shape[-1] // block * size


def _unknown(name: str, tensors: list[str]) -> CheckpointError:
    listed = ", ".join(plain(tensor) for tensor in sorted(tensors)[:20])
    more = f" and {len(tensors) - 20} more" if len(tensors) > 20 else ""
    return CheckpointError(
        f"{name} holds {len(tensors)} tensors that no supported model has ({listed}{more})"
    )
