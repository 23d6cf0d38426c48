"""The supported model families, and checks that refuse other models by name."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from dms_jax.checks import CountOnDevice, check, show
from dms_jax.errors import ConfigError

MAX_LAYERS = 10_000
_GELU = ("gelu_pytorch_tanh", "gelu_tanh")


@dataclasses.dataclass(frozen=True)
class Family:
    """The common properties of a Hugging Face family of models.

    Attributes:
      architecture: the class in transformers.
      defaults: transformers' defaults for missing fields.
      fixed: fields of `ModelConfig` that are equal for all of its models.
      biases: bias fields of its config: "attention_bias", "mlp_bias".
      layer_types: default of the layers' attention, to be repeated; None for a family whose config
        has no `layer_types`.
      windowed: whether every layer has the window that `sliding_window` gives.
      activations: the supported values of `hidden_act`.
    """

    architecture: str
    defaults: Mapping[str, Any]
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    biases: tuple[str, ...] = ()
    layer_types: tuple[str, ...] | None = None
    windowed: bool = False
    activations: tuple[str, ...] = ("silu", "swish")


_SLIDING, _FULL = "sliding_attention", "full_attention"
_OLMO: dict[str, Any] = dict(norms="post", qk_norm=True, qk_norm_over="heads")
_GEMMA: dict[str, Any] = dict(
    norms="both", norm_offset=True, activation="gelu_tanh", scaled_embedding=True
)


def _defaults(kv_heads: int | None, head_dim: int | None, positions: int, **more: Any) -> Any:
    return {
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "sliding_window": None,
        "query_pre_attn_scalar": None,
    } | more


FAMILIES: dict[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM", _defaults(None, None, 2048), biases=("attention_bias", "mlp_bias")
    ),
    "mistral": Family(
        "MistralForCausalLM", _defaults(8, None, 131072, sliding_window=4096), windowed=True
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        _defaults(32, None, 32768, sliding_window=4096),
        fixed=dict(qkv_bias=True),
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        _defaults(32, 128, 32768, sliding_window=4096),
        fixed=dict(qk_norm=True),
        biases=("attention_bias",),
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        _defaults(4, None, 32768, sliding_window=4096),
        fixed=dict(qk_norm=True),
        biases=("attention_bias",),
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        _defaults(None, None, 2048, rms_norm_eps=1e-5),
        fixed=_OLMO,
        biases=("attention_bias",),
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        _defaults(None, None, 2048, rms_norm_eps=1e-5, rope_theta=500_000.0, sliding_window=4096),
        fixed=_OLMO,
        biases=("attention_bias",),
        layer_types=(_SLIDING, _SLIDING, _SLIDING, _FULL),
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        _defaults(4, None, 32768, rope_theta=2_000_000.0, tie_word_embeddings=True),
        biases=("attention_bias", "mlp_bias"),
    ),
    "phi3": Family(
        "Phi3ForCausalLM", _defaults(None, None, 4096, rms_norm_eps=1e-5), windowed=True
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        _defaults(
            *(4, 256, 8192),
            tie_word_embeddings=True,
            sliding_window=4096,
            query_pre_attn_scalar=256,
            attn_logit_softcapping=50.0,
            final_logit_softcapping=30.0,
        ),
        fixed=_GEMMA,
        biases=("attention_bias",),
        layer_types=(_SLIDING, _FULL),
        activations=_GELU,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        _defaults(
            *(4, 256, 131072),
            rope_theta=1_000_000.0,
            tie_word_embeddings=True,
            sliding_window=4096,
            query_pre_attn_scalar=256,
        ),
        fixed=_GEMMA | dict(qk_norm=True),
        biases=("attention_bias",),
        layer_types=(*[_SLIDING] * 5, _FULL),
        activations=_GELU,
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        _defaults(
            *(8, 64, 131072),
            rms_norm_eps=1e-5,
            rope_theta=150_000.0,
            sliding_window=128,
            attention_bias=True,
        ),
        fixed=dict(sinks=True, activation="clamped_swiglu", mlp_bias=True),
        biases=("attention_bias",),
        layer_types=(_SLIDING, _FULL),
    ),
}
ARCHITECTURES = {family.architecture: name for name, family in FAMILIES.items()} | {
    "Qwen3ForCausalLMDMS": "qwen3"
}


@dataclasses.dataclass(frozen=True)
class Wrapper:
    """A model that reads images, with a language model of a supported family.

    Attributes:
      architecture: the class in transformers.
      family: the family of its language model.
      defaults: defaults of fields that transformers 4 omits in `text_config`, if different from the
        family's.
    """

    architecture: str
    family: str
    defaults: Mapping[str, Any]


def _sizes(vocabulary: int, hidden: int, intermediate: int, layers: int, heads: int) -> Any:
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }


WRAPPERS: dict[str, Wrapper] = {
    "gemma3": Wrapper(
        "Gemma3ForConditionalGeneration", "gemma3_text", _sizes(262208, 2304, 9216, 26, 8)
    ),
    "mistral3": Wrapper(
        "Mistral3ForConditionalGeneration", "mistral", _sizes(32000, 4096, 14336, 32, 32)
    ),
    "qwen3_vl": Wrapper(
        "Qwen3VLForConditionalGeneration",
        "qwen3",
        _sizes(151936, 4096, 22016, 32, 32)
        | {"max_position_embeddings": 128000, "rope_theta": 5_000_000.0},
    ),
}
# Fields of a wrapper's config that override those of its language model.
_OF_WRAPPERS = ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")
# Positions of image tokens; text tokens have a single position.
_OF_IMAGES = ("mrope_section", "mrope_interleaved")

SUPPORTED = (
    "Llama 2/3/3.1/3.2, Mistral, Qwen2/2.5, Qwen3 (dense and mixtures of experts), OLMo 2 and 3, "
    "SmolLM3, Phi-3 and Phi-4, Gemma 2 and 3, gpt-oss; without images Mistral 3 and Qwen3-VL"
)


def language_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the language model's config of a model that reads images; others unchanged.

    Raises:
      ConfigError: the architecture is not supported, or `text_config` is missing.
    """
    kind = config.get("model_type") if isinstance(config, Mapping) else None
    wrapper = WRAPPERS.get(kind) if isinstance(kind, str) else None
    if wrapper is None:
        return config
    names, text = config.get("architectures"), config.get("text_config")
    if names not in (None, [wrapper.architecture]):
        raise ConfigError(
            f"Architecture {show(names)} is not supported; of this kind {wrapper.architecture} is."
        )
    if not isinstance(text, Mapping) or not text:
        raise ConfigError(f"text_config must be a JSON object, got {show(text)}.")
    found: dict[str, Any] = {**wrapper.defaults, **text}
    found |= {name: config[name] for name in _OF_WRAPPERS if config.get(name) is not None}
    if config.get("quantization_config"):
        found["quantization_config"] = config["quantization_config"]
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(found.get(name), Mapping):
            found[name] = {k: v for k, v in found[name].items() if k not in _OF_IMAGES}
    found.pop("architectures", None)
    if found.get("model_type", wrapper.family) in (f"{kind}_text", wrapper.family):
        found["model_type"] = wrapper.family
    return found


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


def refuse_unsupported(config: Mapping[str, Any], family: str) -> None:
    """Raises ConfigError for every field that changes the computation in an unsupported way."""
    served = FAMILIES[family].activations
    for name in ("hidden_act", "hidden_activation"):
        act = config.get(name)
        if act is not None and act not in served:
            raise ConfigError(f"{name} {show(act)} is not supported; supported: {served[0]}.")
    quantized = config.get("quantization_config")
    packed = isinstance(quantized, Mapping) and quantized.get("quant_method") == "mxfp4"
    if quantized not in (None, {}) and not (packed and family == "gpt_oss"):
        raise ConfigError(
            "The checkpoint is quantized (quantization_config), which is not supported. Load the "
            "unquantized weights."
        )
    tp = config.get("pretraining_tp")
    if tp is not None and tp != 1:
        raise ConfigError(f"pretraining_tp {show(tp)} is not supported. Set it to 1.")
    if family in ("qwen3_moe", "gpt_oss"):
        _refuse_dense_layers(config)
    else:
        for name in (
            *("num_experts", "num_local_experts", "n_routed_experts"),
            "moe_intermediate_size",
        ):
            if config.get(name):
                raise ConfigError(
                    f"Mixture of experts ({name}) is not supported in a {family}; supported: "
                    f"{SUPPORTED}."
                )
    for name, value in (("swiglu_limit", 7.0), ("swiglu_alpha", 1.702)):
        if config.get(name) not in (None, value):
            raise ConfigError(f"{name} {show(config[name])} is not supported; supported: {value}.")
    if config.get("is_encoder_decoder"):
        raise ConfigError(f"Encoder-decoder models are not supported; supported: {SUPPORTED}.")
    if config.get("use_mrope"):
        raise ConfigError("Multimodal rotary positions (use_mrope) are not supported.")
    if config.get("use_bidirectional_attention"):
        raise ConfigError("Bidirectional attention (use_bidirectional_attention) is not supported.")


def _refuse_dense_layers(config: Mapping[str, Any]) -> None:
    """Raises ConfigError if some layers of a mixture of experts are dense."""
    if config.get("mlp_only_layers"):
        raise ConfigError(
            f"mlp_only_layers {show(config['mlp_only_layers'])} is not supported: either all "
            "layers have experts, or none."
        )
    if config.get("decoder_sparse_step") not in (None, 1):
        raise ConfigError(
            f"decoder_sparse_step {show(config['decoder_sparse_step'])} is not supported: either "
            "all layers have experts, or none."
        )


def layer_types_of(
    config: Mapping[str, Any], family: str, num_layers: int, max_positions: int
) -> tuple[tuple[str, ...], int | None]:
    """Returns each layer's kind of attention (`ModelConfig.layer_types`), and the window.

    A window of at least `max_positions` counts as none.
    """
    about = FAMILIES[family]
    given = config.get("layer_types")
    if given is not None:
        _check_layer_types(given, num_layers, (_FULL, _SLIDING) if about.layer_types else (_FULL,))
    elif about.layer_types is not None:
        group = about.layer_types
        every = config.get("sliding_window_pattern")  # the predecessor of `layer_types`
        if family == "gemma3_text" and every is not None:
            every = check("sliding_window_pattern", every, CountOnDevice)
            group = (*[_SLIDING] * min(every - 1, num_layers), _FULL)
        given = [group[layer % len(group)] for layer in range(num_layers)]
    window = config.get("sliding_window", about.defaults["sliding_window"])
    slides = about.windowed or (given is not None and _SLIDING in given)
    if family in ("qwen2", "qwen3", "qwen3_moe"):
        used = config.get("use_sliding_window")
        slides = check("use_sliding_window", False if used is None else used, bool)
        first = config.get("max_window_layers", 28)
        if given is not None or (isinstance(first, int) and first >= num_layers):
            slides = slides and family == "qwen3_moe"
    if slides and window is not None:
        window = check("sliding_window", window, CountOnDevice)
        if window < max_positions or about.layer_types is not None:  # their rotation may differ
            if about.layer_types is None and not about.windowed:
                raise ConfigError(
                    f"Sliding-window attention (sliding_window {window} below "
                    f"max_position_embeddings {max_positions}) is not supported in a {family}. If "
                    "the model was trained without a window, set sliding_window to null."
                )
            kinds = [_SLIDING] * num_layers if about.windowed else given
            assert kinds is not None
            return tuple("sliding" if kind == _SLIDING else "full" for kind in kinds), window
    if family == "smollm3":
        return tuple(_without_rotation(config, num_layers)), None
    return ("full",) * num_layers, None


def _check_layer_types(given: Any, num_layers: int, served: tuple[str, ...]) -> None:
    if not isinstance(given, list):
        raise ConfigError(f"layer_types must be a list, got {show(given)}.")
    for layer, kind in enumerate(given):
        if kind not in served:
            raise ConfigError(
                f"Layer {layer} has attention of type {show(kind)}, which is not supported; "
                f"supported: {', '.join(served)}."
            )
    if len(given) != num_layers:
        raise ConfigError(f"layer_types names {len(given)} layers; the model has {num_layers}.")


def _without_rotation(config: Mapping[str, Any], num_layers: int) -> list[str]:
    """Returns the kinds of SmolLM3's layers; `no_rope_layers` marks those without rotation."""
    rotated = config.get("no_rope_layers")
    if rotated is None:
        every = config.get("no_rope_layer_interval")
        every = check("no_rope_layer_interval", 4 if every is None else every, CountOnDevice)
        rotated = [int((layer + 1) % every != 0) for layer in range(num_layers)]
    if not isinstance(rotated, list) or len(rotated) < num_layers:
        raise ConfigError(
            f"no_rope_layers must be a list of {num_layers} numbers, got {show(rotated)}."
        )
    if any(each not in (0, 1) for each in rotated):
        raise ConfigError(f"no_rope_layers must hold 0 and 1, got {show(rotated)}.")
    return ["full" if each else "unrotated" for each in rotated[:num_layers]]
