"""Checks for `dms_jax.config`: the supported model families, and what is refused by name."""

from collections.abc import Mapping
from typing import Any

from dms_jax.checks import CountOnDevice, check, show
from dms_jax.errors import ConfigError

MAX_LAYERS = 10_000

# The defaults of transformers for fields that a config leaves out.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": None, "head_dim": None, "max_position_embeddings": 2048},
    "mistral": {"num_key_value_heads": 8, "head_dim": None, "max_position_embeddings": 131072},
    "qwen2": {"num_key_value_heads": 32, "head_dim": None, "max_position_embeddings": 32768},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768},
}
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3ForCausalLMDMS": "qwen3",
}
SUPPORTED = "Llama 2/3/3.1/3.2, Qwen2/2.5, Qwen3, and Mistral without a sliding window"


def family_of(config: Mapping[str, Any]) -> str:
    """Returns the family that `model_type` and `architectures` name, which must agree."""
    if not isinstance(config, Mapping):
        raise ConfigError(f"A model config is a JSON object, got {show(config)}.")
    model_type = config.get("model_type")
    names = config.get("architectures")
    if names is not None and not (
        isinstance(names, list) and names and all(isinstance(name, str) for name in names)
    ):
        raise ConfigError(f"architectures must be a list of names, got {show(names)}.")
    if model_type is None and names is None:
        raise ConfigError(
            "The config names neither model_type nor architectures, so it is not a model that "
            f"can be loaded; supported: {SUPPORTED}."
        )
    for name in names or []:
        if name not in ARCHITECTURES:
            raise ConfigError(
                f"Architecture {show(name)} is not supported; supported: {SUPPORTED}."
            )
    if model_type is None and names:
        model_type = ARCHITECTURES[names[0]]
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ConfigError(
            f"model_type {show(model_type)} is not supported; supported: {SUPPORTED}."
        )
    for name in names or []:
        if ARCHITECTURES[name] != model_type:
            raise ConfigError(f"Architecture {name} does not belong to model_type {model_type!r}.")
    return model_type


def refuse_unsupported(config: Mapping[str, Any]) -> None:
    """Raises ConfigError for every field that changes the computation in an unsupported way."""
    act = config.get("hidden_act")
    if act is not None and act not in ("silu", "swish"):
        raise ConfigError(f"hidden_act {show(act)} is not supported; supported: silu.")
    if config.get("quantization_config") not in (None, {}):
        raise ConfigError(
            "The checkpoint is quantized (quantization_config), which is not supported. Load the "
            "unquantized weights."
        )
    tp = config.get("pretraining_tp")
    if tp is not None and tp != 1:
        raise ConfigError(f"pretraining_tp {show(tp)} is not supported. Set it to 1.")
    for name in ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size"):
        if config.get(name):
            raise ConfigError(
                f"Mixture of experts ({name}) is not supported; supported: {SUPPORTED}."
            )
    if config.get("is_encoder_decoder"):
        raise ConfigError(f"Encoder-decoder models are not supported; supported: {SUPPORTED}.")
    if config.get("use_mrope"):
        raise ConfigError("Multimodal rotary positions (use_mrope) are not supported.")


def refuse_sliding_window(
    config: Mapping[str, Any], family: str, num_layers: int, max_positions: int
) -> None:
    """Raises ConfigError if a layer attends to a window shorter than the longest sequence."""
    layer_types = config.get("layer_types")
    if layer_types is not None:
        if not isinstance(layer_types, list):
            raise ConfigError(f"layer_types must be a list, got {show(layer_types)}.")
        for layer, kind in enumerate(layer_types):
            if kind != "full_attention":
                raise ConfigError(
                    f"Layer {layer} has attention of type {show(kind)}, which is not supported; "
                    "every layer must be full_attention."
                )
    if family == "llama":
        return
    window = config.get("sliding_window", 4096)  # transformers' default when the key is absent
    if family in ("qwen2", "qwen3"):
        used = config.get("use_sliding_window")
        if not check("use_sliding_window", False if used is None else used, bool):
            return
        first = config.get("max_window_layers", 28)
        if layer_types is not None or (isinstance(first, int) and first >= num_layers):
            return
    if window is not None and check("sliding_window", window, CountOnDevice) < max_positions:
        raise ConfigError(
            f"Sliding-window attention (sliding_window {window} below max_position_embeddings "
            f"{max_positions}) is not supported. If the model was trained without a window, set "
            "sliding_window to null."
        )
