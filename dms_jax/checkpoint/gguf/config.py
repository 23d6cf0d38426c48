"""Convert the metadata of a GGUF file into a `ModelConfig`.

Every entry under the architecture's name (`llama.block_count`) must be known here or neutral (0,
false, empty), because an unknown entry could change the model.

The rotary scaling of Llama 3.1 and later is not in the metadata but in a tensor, rope_freqs.weight
[D/2], the divisor of each frequency:

    f_i = 1 / ((1 - s_i) / F + s_i)
    s_i = clip((original / wavelength_i - low) / (high - low), 0, 1)

The parameters are recovered from it, and checked against it.
"""

import dataclasses
import math
from typing import Any

import numpy as np

from dms_jax.checkpoint.gguf.file import GgufFiles
from dms_jax.checkpoint.gguf.weights import ROPE_FACTORS, GgufWeights
from dms_jax.checkpoint.weights import Tensors
from dms_jax.checks import CountOnDevice, NotNegative, Number, Positive, check
from dms_jax.config import Experts, Layers, ModelConfig, Rope, scaled_positions
from dms_jax.config_checks import FAMILIES
from dms_jax.errors import CheckpointError, ConfigError, plain

# GGUF architecture -> Hugging Face family. llama.cpp's converter writes Mistral models as llama.
ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "gemma3": "gemma3_text",
    "gpt-oss": "gpt_oss",
}

# llama.cpp's codes of expert weighting: a softmax over all experts, or over the chosen ones.
_GATING = {"qwen3_moe": 1, "gpt_oss": 3}

# Values of general.type in files that are not models.
_KINDS = {
    "adapter": "a LoRA adapter; give the GGUF of the whole model",
    "mmproj": "the vision or audio part of a model, which is not supported",
    "imatrix": "an importance matrix, not a model",
    "vocab": "a vocabulary without a model",
}

# Entries that are read below or do not affect the computation.
_KNOWN = {
    "vocab_size",
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "attention.causal",
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "rope.freq_base_swa",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "rope.scaling.yarn_ext_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "tensor_data_layout",
}
_KNOWN_OF_EXPERTS = {
    "expert_count",
    "expert_used_count",
    "expert_feed_forward_length",
    "expert_gating_func",
    "expert_weights_norm",
}
# Factors, which are neutral if they are 1.
_FACTORS = {
    "embedding_scale",
    "residual_scale",
    "logit_scale",
    "expert_weights_scale",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_attn_factor",
}


def read_model(files: GgufFiles) -> tuple[ModelConfig, Tensors]:
    """Reads the config of a model and finds its tensors.

    Raises:
        CheckpointError: the file is damaged, or does not contain a supported model.
        ConfigError: the metadata are malformed, or describe a model that is not supported exactly.
    """
    architecture = _architecture(files)
    family = ARCHITECTURES[architecture]
    metadata = _Metadata(files)
    metadata.refuse_unknown(experts=family in _GATING)
    weights = GgufWeights(files, architecture)
    try:
        config = _config(files, metadata, weights, family)
    except ConfigError as error:
        if files.name in str(error):
            raise
        raise ConfigError(f"{files.name}: {error}") from error
    if family == "llama":
        weights.interleaved(config.num_heads, config.num_kv_heads)
    return config, weights


def _config(
    files: GgufFiles, metadata: "_Metadata", weights: GgufWeights, family: str
) -> ModelConfig:
    num_layers = metadata.get("block_count", Layers)
    hidden_size = metadata.get("embedding_length", CountOnDevice)
    num_heads = metadata.get("attention.head_count", CountOnDevice, per_layer=True)
    if metadata.has("attention.key_length"):
        head_dim = metadata.get("attention.key_length", CountOnDevice)
    elif hidden_size % num_heads:
        raise ConfigError(
            f"{files.name}: embedding_length ({hidden_size}) is not a multiple of "
            f"attention.head_count ({num_heads}) and there is no attention.key_length"
        )
    else:
        head_dim = hidden_size // num_heads
    for key in ("attention.value_length", "rope.dimension_count"):
        metadata.must_be(key, head_dim, CountOnDevice, "the size of a head")
    metadata.must_be("attention.causal", True, bool, "attention to the past alone")
    vocab_size = weights.shapes.get("model.embed_tokens.weight", (0,))[0]
    if vocab_size:  # else the tensor is reported as missing later
        metadata.must_be("vocab_size", vocab_size, CountOnDevice, "the rows of token_embd.weight")
    positions = metadata.get("context_length", CountOnDevice)
    rope = _rope(metadata, weights, positions, head_dim)
    about = FAMILIES[family]
    options: dict[str, Any] = dict(
        qkv_bias=weights.has("self_attn.q_proj.bias"),
        output_bias=weights.has("self_attn.o_proj.bias"),
        mlp_bias=weights.has("mlp.down_proj.bias"),
    )
    options |= about.fixed
    window = metadata.get("attention.sliding_window", int, 0)
    if family == "gemma3_text":
        options |= _windows(metadata, num_layers, window, every=6)
        options |= _gemma3(metadata, num_layers, head_dim, hidden_size, num_heads)
    else:
        positions = scaled_positions(rope, positions)
        if family == "gpt_oss":
            options |= _windows(metadata, num_layers, window, every=2)
            if rope.kind == "yarn":  # from the model's config; GGUF files do not contain it
                rope = dataclasses.replace(rope, truncate=False)
        elif 0 < window < positions:
            raise ConfigError(
                f"{files.name}: a sliding window of {window} tokens "
                f"({metadata.key('attention.sliding_window')}) is not supported"
            )
    experts = _experts(metadata, family) if family in _GATING else None
    return ModelConfig(
        vocab_size=vocab_size or metadata.get("vocab_size", CountOnDevice, 1),
        hidden_size=hidden_size,
        intermediate_size=metadata.get(
            "feed_forward_length" if experts is None else "expert_feed_forward_length",
            CountOnDevice,
            per_layer=True,
        ),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=metadata.get(
            "attention.head_count_kv", CountOnDevice, num_heads, per_layer=True
        ),
        head_dim=head_dim,
        max_position_embeddings=positions,
        rms_norm_eps=metadata.get("attention.layer_norm_rms_epsilon", Positive),
        rope=rope,
        experts=experts,
        tie_embeddings="lm_head.weight" not in weights.shapes,
        model_type=family,
        **options,
    )


def _windows(metadata: "_Metadata", num_layers: int, window: int, *, every: int) -> dict[str, Any]:
    """Returns window and layer types; by default each `every`-th layer has full attention."""
    every = metadata.get("attention.sliding_window_pattern", CountOnDevice, every)
    if not window or every == 1:
        raise ConfigError(
            f"{metadata.name} lacks a window ({metadata.key('attention.sliding_window')}) or "
            "layers that have it"
        )
    sliding = min(every, num_layers + 1) - 1
    return dict(layer_types=(*["sliding"] * sliding, "full"), window=window)


def _gemma3(
    metadata: "_Metadata", num_layers: int, head_dim: int, hidden_size: int, num_heads: int
) -> dict[str, Any]:
    """Returns what Gemma 3's files lack: the rope of sliding layers, the attention scale."""
    # Only the largest model (62 layers) does not scale by its head size.
    scale = (hidden_size / num_heads) ** -0.5 if num_layers == 62 else None
    return dict(
        local_rope=Rope(theta=metadata.get("rope.freq_base_swa", Number, 10_000.0)),
        attention_scale=None if scale == head_dim**-0.5 else scale,
    )


def _experts(metadata: "_Metadata", family: str) -> Experts:
    gating = _GATING[family]
    metadata.must_be("expert_gating_func", gating, int, "a softmax as the family has it")
    return Experts(
        count=metadata.get("expert_count", CountOnDevice),
        per_token=metadata.get("expert_used_count", CountOnDevice),
        normalized=metadata.get("expert_weights_norm", bool, True),
    )


def _architecture(files: GgufFiles) -> str:
    """Reads the architecture of a file; raises CheckpointError if it is unsupported."""
    kind = files.metadata.get("general.type", "model")
    if kind != "model":
        what = _KINDS.get(kind, "not supported") if isinstance(kind, str) else "not supported"
        raise CheckpointError(f"{files.name} holds general.type {plain(repr(kind))}: {what}")
    architecture = files.metadata.get("general.architecture")
    if architecture not in tuple(ARCHITECTURES):
        raise CheckpointError(
            f"{files.name} holds the architecture {plain(repr(architecture))}, which is not "
            f"supported; supported: {', '.join(ARCHITECTURES)}"
        )
    return architecture


class _Metadata:
    """The metadata entries of the architecture, by key without the prefix."""

    def __init__(self, files: GgufFiles):
        self.name = files.name
        self._prefix = f"{files.metadata['general.architecture']}."
        self._values = {
            key.removeprefix(self._prefix): value
            for key, value in files.metadata.items()
            if key.startswith(self._prefix)
        }

    def key(self, name: str) -> str:
        return self._prefix + name

    def has(self, name: str) -> bool:
        return name in self._values

    def get(self, name: str, kind: Any, default: Any = None, *, per_layer: bool = False) -> Any:
        """Reads and checks an entry; with `per_layer` also an array of equal numbers."""
        value = self._values.get(name)
        if value is None and default is not None:
            return default
        if per_layer and isinstance(value, list) and value:
            if any(entry != value[0] for entry in value):
                raise ConfigError(
                    f"{self.name}: {self.key(name)} differs from layer to layer, which is not "
                    "served"
                )
            value = value[0]
        if value is None:
            raise ConfigError(f"{self.name} lacks {self.key(name)}")
        return check(f"{self.name}: {self.key(name)}", value, kind)

    def must_be(self, name: str, wanted: Any, kind: Any, what: str) -> None:
        found = self.get(name, kind, wanted)
        if found != wanted:
            raise ConfigError(
                f"{self.name}: {self.key(name)} is {found}, and only {what} ({wanted}) is supported"
            )

    def refuse_unknown(self, *, experts: bool) -> None:
        found = [n for n, value in self._values.items() if n.startswith("expert_") and value]
        if found and not experts:
            raise ConfigError(
                f"{self.name} is a mixture of experts ({self.key(found[0])}): not supported"
            )
        known = _KNOWN | (_KNOWN_OF_EXPERTS if experts else set())
        unknown = [
            f"{self.key(name)} = {plain(repr(value), 40)}"
            for name, value in self._values.items()
            if name not in known
            and value not in (0, "", [])
            and value is not False
            and not (name in _FACTORS and value == 1)
        ]
        if unknown:
            raise ConfigError(
                f"{self.name} has unsupported settings: {', '.join(sorted(unknown)[:20])}"
            )


def _rope(metadata: _Metadata, weights: GgufWeights, positions: int, head_dim: int) -> Rope:
    theta = metadata.get("rope.freq_base", Number, 10_000.0)
    # 0 means no factor, as in llama.cpp.
    factor = metadata.get("rope.scaling.factor", NotNegative, 0) or (
        metadata.get("rope.scale_linear", NotNegative, 0) or 1.0
    )
    # In files older than rope.scaling.type, a factor means linear scaling.
    kind = metadata.get("rope.scaling.type", str, "none" if factor == 1 else "linear")
    original = metadata.get("rope.scaling.original_context_length", int, 0)
    factors = weights.rope_factors()
    if factors is not None and (factors != 1).any():
        if kind != "none":
            raise ConfigError(
                f"{metadata.name} scales rotary frequencies by {metadata.key('rope.scaling.type')} "
                f"{plain(kind)} and by {ROPE_FACTORS}, which is not supported"
            )
        if factors.shape != (head_dim // 2,):
            raise CheckpointError(
                f"{metadata.name}: {ROPE_FACTORS} is {plain(list(factors.shape))}, the metadata "
                f"ask for {[head_dim // 2]}"
            )
        return _llama3(metadata.name, factors, theta, original)
    if kind == "none":
        return Rope(theta=theta)
    if kind == "linear":
        return Rope(theta=theta, kind="linear", factor=factor)
    if kind != "yarn":
        raise ConfigError(
            f"{metadata.name}: rotary scaling {plain(repr(kind))} "
            f"({metadata.key('rope.scaling.type')}) is not supported; supported: none, linear, "
            "yarn, the factors of Llama 3"
        )
    metadata.must_be("rope.scaling.yarn_ext_factor", 1.0, Number, "the whole of the ramp")
    return Rope(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_position_embeddings=original or positions,
        beta_fast=metadata.get("rope.scaling.yarn_beta_fast", Positive, 32.0),
        beta_slow=metadata.get("rope.scaling.yarn_beta_slow", Positive, 1.0),
    )


def _llama3(name: str, factors: np.ndarray, theta: float, original: int) -> Rope:
    """Recovers the parameters of Llama 3's scaling from its factors.

    The bounds are Llama's, 1 and 4. If the metadata lack the original length, it follows from any
    factor between 1 and F.
    """
    low, high = 1.0, 4.0
    turns = theta ** (-np.arange(len(factors)) / len(factors)) / (2 * math.pi)  # 1 / wavelength
    largest = float(str(np.float32(factors.max())))
    lengths = [original or 8192]
    between = (factors > 1.001) & (factors < 0.999 * largest)
    if between.any():
        smooth = (1 / factors[between] - 1 / largest) / (1 - 1 / largest)
        lengths.append(round(float(np.median(((high - low) * smooth + low) / turns[between]))))
    for length in lengths:
        smooth = np.clip((length * turns - low) / (high - low), 0, 1)
        if np.allclose(1 / ((1 - smooth) / largest + smooth), factors, rtol=1e-5, atol=0):
            return Rope(
                theta=theta,
                kind="llama3",
                factor=largest,
                original_max_position_embeddings=length,
                low_freq_factor=low,
                high_freq_factor=high,
            )
    raise ConfigError(
        f"{name}: the factors of rotary frequencies in {ROPE_FACTORS} are not of the kind that "
        "Llama 3 has, and others are not supported"
    )
