"""`ModelConfig`: the configuration of a model, to and from its Hugging Face form.

Supported exactly: the families of `config_checks.FAMILIES`. They are one architecture with
switches: grouped-query attention, rotary positions, and a gated feed-forward, dense or of experts.
Layers differ in attention span and rotation (`LayerKind`), and the kinds of a model's layers
repeat. Everything else is refused by name, because a model that is almost right is wrong.

Both spellings of a Hugging Face config are read: `rope_theta` + `rope_scaling` + `torch_dtype`
(transformers 4) and `rope_parameters` + `dtype` (transformers 5). The first is written, because
both versions read it.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from dms_jax.checks import CountOnDevice, NotNegative, Number, Options, Positive, Range, check, show
from dms_jax.config_checks import (
    FAMILIES,
    MAX_LAYERS,
    SUPPORTED,
    family_of,
    language_config,
    layer_types_of,
    refuse_unsupported,
)
from dms_jax.errors import ConfigError

RopeKind = Literal["default", "linear", "llama3", "yarn"]
ROPE_KINDS: tuple[RopeKind, ...] = get_args(RopeKind)
Layers = Annotated[int, Range(1, MAX_LAYERS)]
LayerType = Literal["full", "sliding", "unrotated"]


@dataclasses.dataclass(frozen=True)
class Rope(Options):
    """The rotary position embedding: its base and the scaling of its frequencies.

    Attributes:
      theta: base of the geometric series of wavelengths.
      kind: "default", "linear", "llama3" or "yarn".
      factor: factor by which the context is extended (all kinds except "default").
      original_max_position_embeddings: positions seen in pretraining ("llama3", "yarn").
      low_freq_factor: "llama3": frequencies of wavelengths above original / low are divided by
        `factor`.
      high_freq_factor: "llama3": wavelengths below original / high do not change.
      beta_fast: "yarn": rotations over the original context above which nothing is interpolated.
      beta_slow: "yarn": rotations below which everything is interpolated.
      attention_factor: "yarn": factor of cos and sin; None derives it from the next two fields.
      mscale: "yarn": numerator of the ratio that gives `attention_factor`.
      mscale_all_dim: "yarn": its denominator.
      truncate: "yarn": whether the ends of the ramp are rounded outwards to whole dimensions.

    Raises:
      ConfigError: a parameter is missing, not a finite positive number, or inconsistent.
    """

    theta: Annotated[Number, Range(1, above=True)] = 10_000.0
    kind: RopeKind = "default"
    factor: Positive = 1.0
    original_max_position_embeddings: CountOnDevice | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    attention_factor: Positive | None = None
    mscale: NotNegative | None = None  # transformers treats 0 as "not given"
    mscale_all_dim: NotNegative | None = None
    truncate: bool = True

    def __post_init__(self):
        super().__post_init__()
        if self.kind in ("llama3", "yarn"):
            original = self.original_max_position_embeddings
            check("Rope: original_max_position_embeddings", original, CountOnDevice)
        if self.kind == "llama3":
            low = check("Rope: low_freq_factor", self.low_freq_factor, Positive)
            high = check("Rope: high_freq_factor", self.high_freq_factor, Positive)
            if high <= low:
                raise ConfigError(
                    f"Rope: high_freq_factor ({high}) must be above low_freq_factor ({low})."
                )


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """The attention span and rotation of a layer.

    Attributes:
      window: number of tokens visible to a query, its own included; None for all.
      rope: the rotary position embedding; None for a layer without positions.
    """

    window: int | None
    rope: Rope | None


@dataclasses.dataclass(frozen=True)
class Experts(Options):
    """The experts of a feed-forward layer.

    Attributes:
      count: number of experts.
      per_token: number of experts per token, those with its largest router logits.
      normalized: whether a token's weights are a softmax over its chosen experts' logits (sum one),
        otherwise those of a softmax over all experts.
    """

    count: CountOnDevice
    per_token: CountOnDevice
    normalized: bool = True

    def read_by(self, tokens: float | int) -> float:
        """Returns the expected share of the experts that a step of `tokens` tokens reads."""
        return 1 - (1 - self.per_token / self.count) ** tokens

    def __post_init__(self):
        super().__post_init__()
        if self.per_token > self.count:
            raise ConfigError(
                f"Experts: per_token ({self.per_token}) exceeds their count ({self.count})."
            )


@dataclasses.dataclass(frozen=True)
class ModelConfig(Options):
    """Shape and switches of a decoder-only transformer; hashable, so it can be a static argument.

    Attributes:
      vocab_size: V, number of token ids.
      hidden_size: E, width of the residual stream.
      intermediate_size: F, width of the feed-forward layer, or of each of its experts.
      num_layers: L, number of layers.
      num_heads: H, number of query heads.
      num_kv_heads: K, number of key and value heads; divides H.
      head_dim: D, dimension of a head; even, and not necessarily E / H.
      max_position_embeddings: longest sequence that the model supports, in tokens, including the
        extension by rotary scaling.
      rms_norm_eps: epsilon that every RMS norm adds to the mean square.
      rope: the rotary position embedding.
      layer_types: kinds of attention of the layers, in order and repeated: "full", "sliding" (a
        query sees the last `window` tokens) or "unrotated" (full, without positions). Stored as the
        shortest repeating group.
      window: number of tokens that a query sees in a "sliding" layer, its own included.
      local_rope: the rotary position embedding of "sliding" layers; None for `rope`.
      qkv_bias: whether the q, k and v projections have biases.
      output_bias: whether the attention output projection has a bias.
      mlp_bias: whether the feed-forward projections, and a router of experts, have biases.
      qk_norm: whether queries and keys are RMS-normed before rotation (Qwen3).
      qk_norm_over: whether that norm is over the dims of a "head", or over all "heads" (OLMo).
      norms: whether attention and feed-forward are normed before ("pre"), after ("post", OLMo) or
        at "both" ends (Gemma).
      norm_offset: whether norms multiply by 1 + their scale (Gemma).
      attention_scale: factor on the dot products of attention; None for 1 / sqrt(D).
      attention_soft_cap: c, if attention scores s become c tanh(s / c) (Gemma 2); None without a
        cap.
      logit_soft_cap: the same for the logits of tokens.
      sinks: whether each query head has a sink logit, which takes part in its softmax (gpt-oss).
      scaled_embedding: whether embeddings are multiplied by sqrt(E) (Gemma).
      activation: how gate and up are combined: silu(gate) up, gelu(gate) up with the tanh form of
        gelu, or (min(max(up, -7), 7) + 1) g sigmoid(1.702 g) with g = min(gate, 7) (gpt-oss).
      experts: the experts of the feed-forward layers; None for one dense feed-forward.
      tie_embeddings: whether the output matrix is the embedding matrix.
      model_type: Hugging Face family, one of `config_checks.FAMILIES`.

    Raises:
      ConfigError: a field has the wrong type or range, or the fields contradict each other.
    """

    vocab_size: CountOnDevice
    hidden_size: CountOnDevice
    intermediate_size: CountOnDevice
    num_layers: Layers
    num_heads: CountOnDevice
    num_kv_heads: CountOnDevice
    head_dim: CountOnDevice
    max_position_embeddings: CountOnDevice
    rms_norm_eps: Positive = 1e-6
    rope: Rope = Rope()
    layer_types: tuple[LayerType, ...] = ("full",)
    window: CountOnDevice | None = None
    local_rope: Rope | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    qk_norm_over: Literal["head", "heads"] = "head"
    norms: Literal["pre", "post", "both"] = "pre"
    norm_offset: bool = False
    attention_scale: Positive | None = None
    attention_soft_cap: Positive | None = None
    logit_soft_cap: Positive | None = None
    sinks: bool = False
    scaled_embedding: bool = False
    activation: Literal["silu", "gelu_tanh", "clamped_swiglu"] = "silu"
    experts: Experts | None = None
    tie_embeddings: bool = False
    model_type: str = "llama"

    def __post_init__(self):
        super().__post_init__()
        if self.model_type not in FAMILIES:
            raise ConfigError(
                f"model_type {show(self.model_type)} is not supported; supported: {SUPPORTED}."
            )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads "
                f"({self.num_kv_heads})."
            )
        if self.head_dim % 2:
            raise ConfigError(
                f"head_dim must be even for rotary positions, got {self.head_dim}. Set it in the "
                "config if it is not hidden_size / num_heads."
            )
        if not self.layer_types:
            raise ConfigError("layer_types must name the attention of at least one layer.")
        shortest = _shortest_group(self.layer_types, self.num_layers)
        object.__setattr__(self, "layer_types", shortest)
        if (self.window is None) == ("sliding" in shortest):
            raise ConfigError(
                f"window ({self.window}) and layer_types ({', '.join(shortest)}) disagree: sliding "
                "layers need a window, and others have none."
            )
        if self.local_rope == self.rope or self.window is None:
            object.__setattr__(self, "local_rope", None)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kinds of the layers of the repeating group."""
        by_name = {
            "full": LayerKind(None, self.rope),
            "sliding": LayerKind(self.window, self.local_rope or self.rope),
            "unrotated": LayerKind(None, None),
        }
        return tuple(by_name[name] for name in self.layer_types)

    @property
    def windowed(self) -> tuple[bool, ...]:
        """Whether each layer has a window; other layers have a cache that grows."""
        group = self.layer_types
        return tuple(group[i % len(group)] == "sliding" for i in range(self.num_layers))

    @property
    def num_full_layers(self) -> int:
        """Number of layers without a window, whose cache a policy compresses."""
        return self.num_layers - sum(self.windowed)

    @property
    def active_width(self) -> int:
        """Feed-forward width per token: F, or F times its number of experts."""
        return self.intermediate_size * (1 if self.experts is None else self.experts.per_token)

    @property
    def score_scale(self) -> float:
        """The factor on the dot products of attention."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def group_size(self) -> int:
        """G = H / K, query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "ModelConfig":
        """Returns the configuration that a Hugging Face `config.json` describes.

        For a model that reads images, it is the language model's.

        Raises:
          ConfigError: the config is malformed, or the model is not supported exactly.
        """
        config = language_config(config)
        family = family_of(config)
        refuse_unsupported(config, family)
        about = FAMILIES[family]

        def given(name: str, default: Any = None) -> Any:
            value = config.get(name)
            return about.defaults.get(name, default) if value is None else value

        hidden_size = check("hidden_size", config.get("hidden_size"), CountOnDevice)
        num_heads = check("num_attention_heads", config.get("num_attention_heads"), CountOnDevice)
        num_layers = check("num_hidden_layers", config.get("num_hidden_layers"), Layers)
        head_dim = given("head_dim")
        if head_dim is None:
            if hidden_size % num_heads:
                raise ConfigError(
                    f"hidden_size ({hidden_size}) is not a multiple of num_attention_heads "
                    f"({num_heads}), and the config gives no head_dim. Set head_dim."
                )
            head_dim = hidden_size // num_heads
        head_dim = check("head_dim", head_dim, CountOnDevice)
        max_positions = check(
            "max_position_embeddings", given("max_position_embeddings"), CountOnDevice
        )
        rope, local_rope = _ropes_from_hf(config, family, max_positions)
        if not family.startswith("gemma"):  # Gemma's positions include the extension
            max_positions = scaled_positions(rope, max_positions)
        layer_types, window = layer_types_of(config, family, num_layers, max_positions)
        kv_heads = given("num_key_value_heads")
        biases = {name: check(name, given(name, False), bool) for name in about.biases}
        attention_bias = biases.get("attention_bias", False)
        scalar = given("query_pre_attn_scalar")
        scale = None if scalar is None else check("query_pre_attn_scalar", scalar, Positive) ** -0.5
        caps = {
            field: None if given(name) is None else check(name, given(name), Positive)
            for field, name in _SOFT_CAPS.items()
            if family.startswith("gemma")
        }
        experts, width = _experts_from_hf(config, family)
        options: dict[str, Any] = dict(
            vocab_size=check("vocab_size", config.get("vocab_size"), CountOnDevice),
            hidden_size=hidden_size,
            intermediate_size=width,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=check(
                "num_key_value_heads", num_heads if kv_heads is None else kv_heads, CountOnDevice
            ),
            head_dim=head_dim,
            max_position_embeddings=max_positions,
            rms_norm_eps=check("rms_norm_eps", given("rms_norm_eps"), Positive),
            rope=rope,
            layer_types=layer_types,
            window=window,
            local_rope=local_rope,
            qkv_bias=attention_bias,
            output_bias=attention_bias,
            mlp_bias=biases.get("mlp_bias", False),
            attention_scale=None if scale == head_dim**-0.5 else scale,
            experts=experts,
            tie_embeddings=check("tie_word_embeddings", given("tie_word_embeddings"), bool),
            model_type=family,
        )
        options |= caps | dict(about.fixed)
        return cls(**options)

    def to_hf(self) -> dict[str, Any]:
        """Returns the Hugging Face `config.json` of this model, for transformers 4 and 5.

        Raises:
          ConfigError: the family has no field for one of the switches (a Mistral with biases).
        """
        family = FAMILIES[self.model_type]
        activation = "gelu_pytorch_tanh" if self.activation == "gelu_tanh" else "silu"
        hf: dict[str, Any] = {
            "architectures": [family.architecture],
            "model_type": self.model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": activation,
            "max_position_embeddings": _unscaled_positions(self),
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope.theta,
            "rope_scaling": _rope_scaling_to_hf(self.rope),
            "tie_word_embeddings": self.tie_embeddings,
            "use_cache": True,
        }
        biases = {"attention_bias": self.qkv_bias, "mlp_bias": self.mlp_bias}
        hf |= {name: biases[name] for name in family.biases}
        if self.model_type in ("qwen2", "qwen3", "qwen3_moe", "smollm3"):
            hf["use_sliding_window"] = False
        if family.windowed or family.layer_types is not None:
            hf["sliding_window"] = self.window
        if family.layer_types is not None:
            names = {True: "sliding_attention", False: "full_attention"}
            hf["layer_types"] = [names[each] for each in self.windowed]
        if self.model_type in ("gemma3_text", "olmo3"):
            hf |= _ropes_by_layer(self)
        if self.model_type == "smollm3":
            types = self.layer_types
            hf["no_rope_layers"] = [
                int(types[layer % len(types)] != "unrotated") for layer in range(self.num_layers)
            ]
        if self.model_type.startswith("gemma"):
            hf["hidden_activation"] = activation
            hf["query_pre_attn_scalar"] = _inverse_square(self.score_scale)
            hf |= {name: getattr(self, field) for field, name in _SOFT_CAPS.items()}
        hf |= _experts_to_hf(self)
        again = ModelConfig.from_hf(hf)
        positions = self.max_position_embeddings
        if dataclasses.replace(again, max_position_embeddings=positions) != self:
            different = [
                f"{field.name}={getattr(self, field.name)}"
                for field in dataclasses.fields(self)
                if getattr(self, field.name) != getattr(again, field.name)
                and field.name != "max_position_embeddings"
            ]
            raise ConfigError(
                f"Hugging Face's {family.architecture} cannot express {', '.join(different)}. "
                "Choose a model_type that has them."
            )
        return hf


_SOFT_CAPS = {
    "attention_soft_cap": "attn_logit_softcapping",
    "logit_soft_cap": "final_logit_softcapping",
}


def _shortest_group[T](names: tuple[T, ...], length: int) -> tuple[T, ...]:
    """Returns the shortest group whose repetition equals that of `names`.

    # names (a, b, a), length 3 Out: (a, b); length 6 (a b a a b a) Out: (a, b, a)
    """
    every = [names[i % len(names)] for i in range(length)]
    size = next(
        size
        for size in range(1, length + 1)
        if all(every[i] == every[i - size] for i in range(size, length))
    )
    return tuple(every[:size])


def _inverse_square(scale: float) -> float | int:
    """Returns x with x ** -0.5 == scale, an integer if possible."""
    scalar = scale**-2
    whole = round(scalar)
    return whole if whole and whole**-0.5 == scale else scalar


def _experts_from_hf(config: Mapping[str, Any], family: str) -> tuple[Experts | None, int]:
    """Returns the experts of a config, and the width of each (or of the dense feed-forward)."""
    names = {
        "qwen3_moe": ("moe_intermediate_size", "num_experts_per_tok", False),
        "gpt_oss": ("intermediate_size", "experts_per_token", True),
    }
    if family not in names:
        width = config.get("intermediate_size")
        return None, check("intermediate_size", width, CountOnDevice)
    width, per_token, always = names[family]
    count = config.get("num_experts", config.get("num_local_experts"))
    chosen = config.get("num_experts_per_tok", config.get(per_token))
    normalized = config.get("norm_topk_prob", False)
    experts = Experts(
        count=check("num_experts", count, CountOnDevice),
        per_token=check("num_experts_per_tok", chosen, CountOnDevice),
        normalized=always or check("norm_topk_prob", bool(normalized), bool),
    )
    return experts, check(width, config.get(width), CountOnDevice)


def _experts_to_hf(config: ModelConfig) -> dict[str, Any]:
    experts = config.experts
    if experts is None:
        return {}
    if config.model_type == "gpt_oss":
        return {
            "num_local_experts": experts.count,
            "num_experts_per_tok": experts.per_token,
            "experts_per_token": experts.per_token,
            "swiglu_limit": 7.0,
        }
    return {
        "num_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": config.intermediate_size,
        "norm_topk_prob": experts.normalized,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def scaled_positions(rope: Rope, positions: int) -> int:
    """Returns the longest sequence of a model whose config gives `positions`.

    As in vLLM: configs often give the positions of pretraining, which "linear" and "yarn" extend by
    their factor. With "llama3" they are already extended.
    """
    original = positions if rope.kind == "linear" else rope.original_max_position_embeddings
    if rope.kind not in ("linear", "yarn") or original is None:
        return positions
    extended = int(min(original * rope.factor, 2**31 - 1))
    return max(positions, extended)


def _unscaled_positions(config: ModelConfig) -> int:
    """Returns the max_position_embeddings that `from_hf` turns into the config's; its inverse."""
    positions = config.max_position_embeddings
    counted = config.model_type.startswith("gemma") or config.rope.kind != "linear"
    if counted or config.rope.factor <= 1:
        return positions
    return max(1, math.ceil(positions / config.rope.factor))


def _ropes_from_hf(
    config: Mapping[str, Any], family: str, max_positions: int
) -> tuple[Rope, Rope | None]:
    """Returns the rope of a model, and of its sliding layers if the family has one for them."""
    by_layer = config.get("rope_parameters")
    local = None
    if family in ("gemma3_text", "olmo3"):
        theta = config.get("rope_local_base_freq") if family == "gemma3_text" else None
        if family == "gemma3_text" and theta is None:
            theta = 10_000.0
        if theta is None:
            theta = config.get("rope_theta")
        local = Rope(
            theta=check("rope_local_base_freq", 500_000.0 if theta is None else theta, Positive)
        )
        if isinstance(by_layer, Mapping) and set(by_layer) & {
            "full_attention",
            "sliding_attention",
        }:
            fields = by_layer.get("sliding_attention")
            if fields is not None:
                where = "rope_parameters.sliding_attention"
                local = _parse_rope(fields, config, family, max_positions, where)
            config = dict(config) | {"rope_parameters": by_layer.get("full_attention")}
    return _rope_from_hf(config, family, max_positions), local


def _rope_from_hf(config: Mapping[str, Any], family: str, max_positions: int) -> Rope:
    """Returns the rope of `rope_parameters` or `rope_scaling`; raises if they disagree."""
    found = {
        name: config[name]
        for name in ("rope_parameters", "rope_scaling")
        if config.get(name) is not None and config[name] != {}
    }
    for name, value in found.items():
        if not isinstance(value, Mapping):
            raise ConfigError(f"{name} must be a JSON object, got {show(value)}.")
    if not found and family == "gpt_oss":
        found = {"rope_scaling": _GPT_OSS_ROPE}
    ropes = [
        _parse_rope(value, config, family, max_positions, name) for name, value in found.items()
    ]
    if len(ropes) == 2 and ropes[0] != ropes[1]:
        raise ConfigError("rope_parameters and rope_scaling disagree. Keep the one that is right.")
    if ropes:
        return ropes[0]
    return _parse_rope({}, config, family, max_positions, "rope_scaling")


# Defaults of transformers.
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _ropes_by_layer(config: ModelConfig) -> dict[str, Any]:
    """Returns the ropes of full and of sliding layers, from either transformers version's form."""
    local = config.local_rope or config.rope
    full = _rope_scaling_to_hf(config.rope) or {"rope_type": "default"}
    sliding = _rope_scaling_to_hf(local) or {"rope_type": "default"}
    fields: dict[str, Any] = {
        "rope_parameters": {
            "full_attention": full | {"rope_theta": config.rope.theta},
            "sliding_attention": sliding | {"rope_theta": local.theta},
        }
    }
    if config.model_type == "gemma3_text":
        fields["rope_local_base_freq"] = local.theta
    return fields


def _parse_rope(
    fields: Mapping[str, Any],
    config: Mapping[str, Any],
    family: str,
    max_positions: int,
    where: str,
) -> Rope:
    def given(name: str, default: Any = None) -> Any:
        value = fields.get(name)
        return default if value is None else value

    if any(isinstance(value, Mapping) for value in fields.values()):
        raise ConfigError(f"{where} differs from layer to layer, which is not supported.")
    for partial in (fields.get("partial_rotary_factor"), config.get("partial_rotary_factor")):
        if partial is not None and partial != 1:
            raise ConfigError(
                f"partial_rotary_factor {show(partial)} is not supported; supported: 1."
            )
    kind = given("rope_type", given("type", "default"))
    if family == "phi3" and kind == "yarn":  # like transformers
        kind = "longrope"
    if kind not in ROPE_KINDS:
        raise ConfigError(
            f"Rotary scaling {show(kind)} ({where}) is not supported; supported: "
            f"{', '.join(ROPE_KINDS)}."
        )
    if fields.get("mrope_section"):
        raise ConfigError(
            f"Multimodal rotary positions (mrope_section in {where}) are not supported."
        )
    theta = given("rope_theta", config.get("rope_theta"))
    theta = FAMILIES[family].defaults["rope_theta"] if theta is None else theta
    theta = check("rope_theta", theta, Positive)
    if kind == "default":
        return Rope(theta=theta)
    factor = given("factor")
    if kind == "linear":
        return Rope(theta=theta, kind=kind, factor=check(f"{where}.factor", factor, Positive))

    # A value outside the rotary fields overrides one inside them, as in transformers 5.
    original = config.get("original_max_position_embeddings") if family != "phi3" else None
    original = given("original_max_position_embeddings") if original is None else original
    original = check(
        f"{where}.original_max_position_embeddings",
        max_positions if original is None else original,
        CountOnDevice,
    )
    if kind == "llama3":
        return Rope(
            theta=theta,
            kind=kind,
            factor=check(f"{where}.factor", factor, Positive),
            original_max_position_embeddings=original,
            low_freq_factor=check(f"{where}.low_freq_factor", given("low_freq_factor"), Positive),
            high_freq_factor=check(
                f"{where}.high_freq_factor", given("high_freq_factor"), Positive
            ),
        )
    optional = {}
    for name in ("attention_factor", "mscale", "mscale_all_dim"):
        if given(name) is not None:
            optional[name] = check(
                f"{where}.{name}",
                given(name),
                Positive if name == "attention_factor" else NotNegative,
            )
    factor = max_positions / original if factor is None else factor
    return Rope(
        theta=theta,
        kind=kind,
        factor=check(f"{where}.factor", factor, Positive),
        original_max_position_embeddings=original,
        beta_fast=check(f"{where}.beta_fast", given("beta_fast") or 32.0, Positive),
        beta_slow=check(f"{where}.beta_slow", given("beta_slow") or 1.0, Positive),
        truncate=check(f"{where}.truncate", given("truncate", True), bool),
        **optional,
    )


def _rope_scaling_to_hf(rope: Rope) -> dict[str, Any] | None:
    if rope.kind == "default":
        return None
    names = {
        "linear": (),
        "llama3": ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
        "yarn": (
            "original_max_position_embeddings",
            "beta_fast",
            "beta_slow",
            "attention_factor",
            "mscale",
            "mscale_all_dim",
            "truncate",
        ),
    }[rope.kind]
    scaling = {"rope_type": rope.kind, "factor": rope.factor}
    scaling |= {name: getattr(rope, name) for name in names if getattr(rope, name) is not None}
    return scaling
