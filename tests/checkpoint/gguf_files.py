"""Write GGUF files, as llama.cpp's converter does from a Hugging Face directory."""

import json
import math
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import gguf
import numpy as np

from tests.checkpoint.support import tensors

Kind = gguf.GGMLQuantizationType
NAMES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
    "gpt_oss": "gpt-oss",
}


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Permute query and key rows as the converter does for the architecture llama.

    It interleaves the two halves of each head's rows: first row of each half, second row of each
    ...
    """
    out = np.empty_like(rows)
    size = len(rows) // heads
    for head in range(heads):
        for place in range(size // 2):
            for half in range(2):
                source = head * size + half * (size // 2) + place
                out[head * size + 2 * place + half] = rows[source]
    return out


def rope_factors(rope: Mapping[str, Any], size: int) -> np.ndarray:
    """The tensor that carries Llama 3's rotary scaling, frequency by frequency."""
    original, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    out = []
    for place in range(size // 2):
        length = 2 * math.pi * rope["rope_theta"] ** (2 * place / size)
        if length < original / high:
            out.append(1.0)
        elif length > original / low:
            out.append(factor)
        else:
            smooth = (original / length - low) / (high - low)
            out.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(out, np.float32)


def random_blocks(shape: tuple[int, ...], kind: Kind, seed: int) -> np.ndarray:
    """Random bytes of a K-quant, which the package cannot make: small scales, any digits."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(seed)
    data = random.integers(0, 256, (math.prod(shape) // block, size)).astype(np.uint8)
    # Offsets of the block's float16 numbers: d and dmin in front, or d at the end.
    places = {Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (size - 2,), Kind.Q3_K: (size - 2,)}
    for place in places[kind]:
        scale = (1e-4 * random.uniform(0.5, 1.5, len(data))).astype(np.float16)
        data[:, place : place + 2] = scale.view(np.uint8).reshape(-1, 2)
    return data.reshape(*shape[:-1], shape[-1] // block * size)


def encode(values: np.ndarray, kind: Kind, seed: int = 0) -> np.ndarray:
    """Encodes numbers as in a GGUF file."""
    plain = {Kind.F32: np.float32, Kind.F16: np.float16, Kind.F64: np.float64}
    if kind in plain:
        return values.astype(plain[kind])
    if kind in (Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K):
        return random_blocks(values.shape, kind, seed)
    return gguf.quants.quantize(values.astype(np.float32), kind)


def decode(data: np.ndarray, kind: Kind) -> np.ndarray:
    """Decodes numbers with the package."""
    if kind in (Kind.F32, Kind.F16, Kind.F64):
        return data
    return gguf.quants.dequantize(data, kind)


def metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata that the converter writes for a Hugging Face config."""
    rope = config.get("rope_parameters") or {
        "rope_theta": config.get("rope_theta", 10_000.0),
        **(config.get("rope_scaling") or {}),
    }
    local = rope.get("sliding_attention")
    rope = rope.get("full_attention", rope)
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    entries: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "attention.key_length": size,
        "attention.value_length": size,
        "rope.dimension_count": size,
        "rope.freq_base": float(rope["rope_theta"]),
    }
    if "num_local_experts" in config:
        width = config.get("moe_intermediate_size", config["intermediate_size"])
        entries["expert_count"] = config["num_local_experts"]
        entries["expert_used_count"] = config["num_experts_per_tok"]
        entries["expert_feed_forward_length"] = width
    if config["model_type"] == "gpt_oss":
        entries["attention.sliding_window"] = config["sliding_window"]
    if local is not None:
        kinds = config["layer_types"]
        entries["attention.sliding_window"] = config["sliding_window"]
        entries["attention.sliding_window_pattern"] = kinds.index("full_attention") + 1
        entries["rope.freq_base_swa"] = float(local["rope_theta"])
    if rope.get("rope_type") in ("linear", "yarn"):
        entries["rope.scaling.type"] = rope["rope_type"]
        entries["rope.scaling.factor"] = float(rope["factor"])
    if rope.get("rope_type") == "yarn":
        entries["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    return entries


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def write(
    path: pathlib.Path,
    architecture: str,
    entries: Mapping[str, Any],
    content: Mapping[str, tuple[np.ndarray, Kind | None]],
    **options: Any,
) -> pathlib.Path:
    """Writes a GGUF of these entries (None omits one) and tensors with the package's writer."""
    writer = gguf.GGUFWriter(path, architecture, **options)
    for key, value in entries.items():
        if value is not None:
            add(writer, key, value)
    for name, (data, kind) in content.items():
        raw = None if kind in (Kind.F32, Kind.F16, Kind.F64) else kind
        writer.add_tensor(name, data, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def convert(
    directory: pathlib.Path,
    path: pathlib.Path,
    kind_of: Callable[[str], Kind] = lambda name: Kind.F32,
    extra: Mapping[str, Any] | None = None,
    change: Callable[[dict], None] = lambda content: None,
    **options: Any,
) -> dict[str, np.ndarray]:
    """Writes a Hugging Face directory as GGUF; returns its dequantised tensors.

    Args:
        directory: the model.
        path: the file to write.
        kind_of: type of each matrix by its GGUF name; vectors are float32.
        extra: entries of the metadata besides the converter's own, by their whole keys.
        change: changes the tensors {name: (data, kind)} before they are written.
        **options: for the package's writer.
    """
    config = json.loads((directory / "config.json").read_text())
    architecture = NAMES[config["model_type"]]
    layers = config["num_hidden_layers"]
    names = gguf.get_tensor_name_map(
        {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}[architecture], layers
    )
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    content, read = {}, {}
    source, packed = as_converted(tensors(directory))
    for place, (theirs, values) in enumerate(sorted(source.items())):
        name = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
        assert name is not None, theirs
        if theirs in packed:
            content[name] = values, Kind.MXFP4
            continue
        kind = Kind.F32 if values.ndim == 1 else kind_of(name)
        head = theirs.split(".")[-2].removesuffix("_proj") if "_proj." in theirs else ""
        swapped = architecture == "llama" and head in heads
        if swapped:
            values = permute(values, heads[head])
        if architecture == "gemma3" and theirs.endswith("norm.weight"):
            values = values + 1
        data = encode(values, kind, place)
        content[name] = data, kind
        back = decode(data, kind)
        read[theirs] = unpermute(back, heads[head]) if swapped else back
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "llama3":
        content["rope_freqs.weight"] = rope_factors(rope, config["head_dim"]), Kind.F32
    change(content)
    entries = {f"{architecture}.{key}": value for key, value in metadata(config).items()}
    write(path, architecture, entries | dict(extra or {}), content, **options)
    return read


def as_converted(
    source: Mapping[str, np.ndarray],
) -> tuple[dict[str, np.ndarray], set[str]]:
    """The tensors of a directory, with experts stacked like the converter's.

    Returns:
        the tensors, and the names of those that are bytes of MXFP4.
    """
    out: dict[str, np.ndarray] = {}
    each: dict[str, dict[int, np.ndarray]] = {}
    packed = set()
    for name, values in source.items():
        if found := re.fullmatch(r"(.+\.experts)\.(\d+)\.(.+)", name):
            each.setdefault(f"{found[1]}.{found[3]}", {})[int(found[2])] = values
        elif name.endswith("sinks"):
            out[f"{name}.weight"] = values
        elif name.endswith("_scales"):
            continue
        elif ".experts." in name:
            kind = "bias" if name.endswith("_bias") else "weight"
            stem = name.removesuffix("_bias").removesuffix("_blocks")
            if name.endswith("_blocks"):
                values = repacked(values, source[f"{stem}_scales"])
            elif kind == "weight":
                values = values.swapaxes(1, 2)
            halves = {stem: values}
            if stem.endswith("gate_up_proj"):  # rows of gate and up alternate
                halves = {
                    stem.replace("gate_up", part): values[:, first::2]
                    for first, part in enumerate(("gate", "up"))
                }
            out |= {f"{part}.{kind}": half for part, half in halves.items()}
            if name.endswith("_blocks"):
                packed |= {f"{part}.{kind}" for part in halves}
        else:
            out[name] = values
    for name, of in each.items():
        out[name] = np.stack([of[expert] for expert in sorted(of)])
    return out, packed


def repacked(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """MXFP4 as a GGUF file holds it: the scale, then numbers 0 to 15 in low halves of bytes.

    Safetensors have numbers 2 i and 2 i + 1 in byte i.
    """
    numbers = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], 32)
    mixed = numbers[..., :16] | numbers[..., 16:] << 4
    rows = np.concatenate([scales[..., None], mixed], axis=-1)
    return np.ascontiguousarray(rows.reshape(*rows.shape[:2], -1))


def unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Inverts `permute`."""
    order = permute(np.arange(len(rows)), heads)
    out = np.empty_like(rows)
    out[order] = rows
    return out
