"""`ModelConfig`: the configuration of a model, to and from its Hugging Face form.

Supported exactly: Llama 2, 3, 3.1 and 3.2, Qwen2 and Qwen2.5, Qwen3, and Mistral without a sliding
window. They are one architecture (pre-norm, grouped-query attention, rotary positions, SwiGLU)
with switches: biases, q/k norms, head size, tied embeddings, and the scaling of the rotary
frequencies. Everything else is refused by name, because a model that is almost right is wrong.

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
    ARCHITECTURES,
    FAMILIES,
    MAX_LAYERS,
    SUPPORTED,
    family_of,
    refuse_sliding_window,
    refuse_unsupported,
)
from dms_jax.errors import ConfigError

RopeKind = Literal["default", "linear", "llama3", "yarn"]
ROPE_KINDS: tuple[RopeKind, ...] = get_args(RopeKind)
Layers = Annotated[int, Range(1, MAX_LAYERS)]


@dataclasses.dataclass(frozen=True)
class Rope(Options):
    """The rotary position embedding: its base and the scaling of its frequencies.

    Attributes:
      theta: base of the geometric series of wavelengths.
      kind: "default", "linear", "llama3" or "yarn".
      factor: factor by which the context is extended (every kind except "default").
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
class ModelConfig(Options):
    """Shape and switches of a decoder-only transformer; hashable, so it can be a static argument.

    Attributes:
      vocab_size: V, number of token ids.
      hidden_size: E, width of the residual stream.
      intermediate_size: F, width of the feed-forward layer.
      num_layers: L, number of layers.
      num_heads: H, number of query heads.
      num_kv_heads: K, number of key and value heads; divides H.
      head_dim: D, dimension of a head; even, and not necessarily E / H.
      max_position_embeddings: longest sequence that the model supports, in tokens, with what the
        scaling of the rotary positions adds.
      rms_norm_eps: epsilon that every RMS norm adds to the mean square.
      rope: the rotary position embedding.
      qkv_bias: whether the q, k and v projections have biases.
      output_bias: whether the attention output projection has a bias.
      mlp_bias: whether the feed-forward projections have biases.
      qk_norm: whether queries and keys are RMS-normed per head before rotation (Qwen3).
      tie_embeddings: whether the output matrix is the embedding matrix.
      model_type: Hugging Face family: "llama", "mistral", "qwen2" or "qwen3".

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
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
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

    @property
    def group_size(self) -> int:
        """G = H / K, query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "ModelConfig":
        """Returns the configuration that a Hugging Face `config.json` describes.

        Raises:
          ConfigError: the config is malformed, or the model is not supported exactly.
        """
        family = family_of(config)
        refuse_unsupported(config)
        defaults = FAMILIES[family]

        def given(name: str, default: Any = None) -> Any:
            value = config.get(name)
            return default if value is None else value

        hidden_size = check("hidden_size", config.get("hidden_size"), CountOnDevice)
        num_heads = check("num_attention_heads", config.get("num_attention_heads"), CountOnDevice)
        num_layers = check("num_hidden_layers", config.get("num_hidden_layers"), Layers)
        head_dim = given("head_dim", defaults["head_dim"])
        if head_dim is None:
            if hidden_size % num_heads:
                raise ConfigError(
                    f"hidden_size ({hidden_size}) is not a multiple of num_attention_heads "
                    f"({num_heads}), and the config gives no head_dim. Set head_dim."
                )
            head_dim = hidden_size // num_heads
        max_positions = check(
            "max_position_embeddings",
            given("max_position_embeddings", defaults["max_position_embeddings"]),
            CountOnDevice,
        )
        rope = _rope_from_hf(config, max_positions)
        max_positions = scaled_positions(rope, max_positions)
        refuse_sliding_window(config, family, num_layers, max_positions)
        kv_heads = given("num_key_value_heads", defaults["num_key_value_heads"])
        attention_bias = family in ("llama", "qwen3") and check(
            "attention_bias", given("attention_bias", False), bool
        )
        return cls(
            vocab_size=check("vocab_size", config.get("vocab_size"), CountOnDevice),
            hidden_size=hidden_size,
            intermediate_size=check(
                "intermediate_size", config.get("intermediate_size"), CountOnDevice
            ),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=check(
                "num_key_value_heads", num_heads if kv_heads is None else kv_heads, CountOnDevice
            ),
            head_dim=check("head_dim", head_dim, CountOnDevice),
            max_position_embeddings=max_positions,
            rms_norm_eps=check("rms_norm_eps", given("rms_norm_eps", 1e-6), Positive),
            rope=rope,
            qkv_bias=family == "qwen2" or attention_bias,
            output_bias=attention_bias,
            mlp_bias=family == "llama" and check("mlp_bias", given("mlp_bias", False), bool),
            qk_norm=family == "qwen3",
            tie_embeddings=check("tie_word_embeddings", given("tie_word_embeddings", False), bool),
            model_type=family,
        )

    def to_hf(self) -> dict[str, Any]:
        """Returns the Hugging Face `config.json` of this model, as transformers 4 and 5 read it.

        Raises:
          ConfigError: the family has no field for one of the switches (a Mistral with biases).
        """
        architecture = next(a for a, family in ARCHITECTURES.items() if family == self.model_type)
        hf: dict[str, Any] = {
            "architectures": [architecture],
            "model_type": self.model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": _unscaled_positions(self),
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope.theta,
            "rope_scaling": _rope_scaling_to_hf(self.rope),
            "tie_word_embeddings": self.tie_embeddings,
            "use_cache": True,
        }
        if self.model_type in ("llama", "qwen3"):
            hf["attention_bias"] = self.qkv_bias
        if self.model_type == "llama":
            hf["mlp_bias"] = self.mlp_bias
        if self.model_type == "mistral":
            hf["sliding_window"] = None
        if self.model_type in ("qwen2", "qwen3"):
            hf["use_sliding_window"] = False
        again = ModelConfig.from_hf(hf)
        positions = self.max_position_embeddings
        if dataclasses.replace(again, max_position_embeddings=positions) != self:
            raise ConfigError(
                f"Hugging Face's {architecture} cannot express this combination of qkv_bias="
                f"{self.qkv_bias}, output_bias={self.output_bias}, mlp_bias={self.mlp_bias}, "
                f"qk_norm={self.qk_norm}. Choose a model_type that has them."
            )
        return hf


def scaled_positions(rope: Rope, positions: int) -> int:
    """Returns the longest sequence of a model whose config gives `positions`.

    As in vLLM: configs often give the positions of pretraining, which "linear" and "yarn" extend by
    their factor. "llama3" has them counted.
    """
    original = positions if rope.kind == "linear" else rope.original_max_position_embeddings
    if rope.kind not in ("linear", "yarn") or original is None:
        return positions
    extended = int(min(original * rope.factor, 2**31 - 1))
    return max(positions, extended)


def _unscaled_positions(config: ModelConfig) -> int:
    """Returns the max_position_embeddings from which `from_hf` makes those of a config."""
    positions = config.max_position_embeddings
    if config.rope.kind != "linear" or config.rope.factor <= 1:
        return positions
    return max(1, math.ceil(positions / config.rope.factor))


def _rope_from_hf(config: Mapping[str, Any], max_positions: int) -> Rope:
    """Returns the rope of `rope_parameters` or `rope_scaling`; raises if they disagree."""
    found = {
        name: config[name]
        for name in ("rope_parameters", "rope_scaling")
        if config.get(name) is not None and config[name] != {}
    }
    for name, value in found.items():
        if not isinstance(value, Mapping):
            raise ConfigError(f"{name} must be a JSON object, got {show(value)}.")
    ropes = [_parse_rope(value, config, max_positions, name) for name, value in found.items()]
    if len(ropes) == 2 and ropes[0] != ropes[1]:
        raise ConfigError("rope_parameters and rope_scaling disagree. Keep the one that is right.")
    return ropes[0] if ropes else _parse_rope({}, config, max_positions, "rope_scaling")


def _parse_rope(
    fields: Mapping[str, Any], config: Mapping[str, Any], max_positions: int, where: str
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
    theta = check("rope_theta", 10_000.0 if theta is None else theta, Positive)
    if kind == "default":
        return Rope(theta=theta)
    factor = given("factor")
    if kind == "linear":
        return Rope(theta=theta, kind=kind, factor=check(f"{where}.factor", factor, Positive))

    # A value outside the rotary fields overrides one inside them, as in transformers 5.
    original = config.get("original_max_position_embeddings")
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
