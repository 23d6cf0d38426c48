"""Shapes of well-known models, as their config.json gives them, for plans that need no weights.

The page of models lists them, and their caches, plain and compressed (`cache_sizes`).
"""

from typing import Any

from dms_jax.config import Experts, ModelConfig, Rope
from dms_jax.config_checks import FAMILIES
from dms_jax.generation.memory import sequence_bytes
from dms_jax.policies import Policy, Vanilla


def shape(family: str, *sizes: Any, **more: Any) -> ModelConfig:
    """Returns a model's shape from V, E, F, L, H, K, D and positions, and other fields by name."""
    return ModelConfig(*sizes, model_type=family, **dict(FAMILIES[family].fixed) | more)


_GEMMA3: dict[str, Any] = dict(
    layer_types=(*["sliding"] * 5, "full"),
    window=512,
    rope=Rope(theta=1e6),
    local_rope=Rope(theta=1e4),
    tie_embeddings=True,
)
_GEMMA3_LONG: dict[str, Any] = _GEMMA3 | dict(
    window=1024, rope=Rope(theta=1e6, kind="linear", factor=8.0)
)
_YARN = Rope(
    theta=150_000.0,
    kind="yarn",
    factor=32.0,
    original_max_position_embeddings=4096,
    truncate=False,
)
_GPT_OSS: dict[str, Any] = dict(
    layer_types=("sliding", "full"), window=128, rope=_YARN, qkv_bias=True, output_bias=True
)
_OLMO3: dict[str, Any] = dict(
    layer_types=(*["sliding"] * 3, "full"), window=4096, rope=Rope(theta=500_000.0)
)
SHAPES: dict[str, ModelConfig] = {
    "llama-3.2-1b": shape("llama", 128256, 2048, 8192, 16, 32, 8, 64, 131072, tie_embeddings=True),
    "llama-2-7b": shape("llama", 32000, 4096, 11008, 32, 32, 32, 128, 4096),
    "llama-3.1-8b": shape("llama", 128256, 4096, 14336, 32, 32, 8, 128, 131072),
    "llama-3.1-70b": shape("llama", 128256, 8192, 28672, 80, 64, 8, 128, 131072),
    "qwen-r1-1.5b": shape("qwen2", 151936, 1536, 8960, 28, 12, 2, 128, 131072),
    "qwen-r1-7b": shape("qwen2", 152064, 3584, 18944, 28, 28, 4, 128, 131072),
    "qwen-r1-32b": shape("qwen2", 152064, 5120, 27648, 64, 40, 8, 128, 131072),
    "qwen3-8b": shape("qwen3", 151936, 4096, 12288, 36, 32, 8, 128, 40960),
    "qwen3-30b-a3b": shape(
        *("qwen3_moe", 151936, 2048, 768, 48, 32, 4, 128, 40960), experts=Experts(128, 8)
    ),
    "mistral-7b": shape("mistral", 32768, 4096, 14336, 32, 32, 8, 128, 32768),
    "olmo-2-7b": shape("olmo2", 100352, 4096, 11008, 32, 32, 32, 128, 4096),
    "olmo-3-7b": shape("olmo3", 100278, 4096, 11008, 32, 32, 32, 128, 65536, **_OLMO3),
    "smollm3-3b": shape(
        *("smollm3", 128256, 2048, 11008, 36, 16, 4, 128, 65536),
        layer_types=("full", "full", "full", "unrotated"),
        tie_embeddings=True,
    ),
    "phi-3-mini-4k": shape(
        "phi3", 32064, 3072, 8192, 32, 32, 32, 96, 4096, layer_types=("sliding",), window=2047
    ),
    "phi-4": shape("phi3", 100352, 5120, 17920, 40, 40, 10, 128, 16384),
    "gemma-2-2b": shape(
        *("gemma2", 256000, 2304, 9216, 26, 8, 4, 256, 8192),
        layer_types=("sliding", "full"),
        window=4096,
        attention_soft_cap=50.0,
        logit_soft_cap=30.0,
        tie_embeddings=True,
    ),
    "gemma-3-270m": shape("gemma3_text", 262144, 640, 2048, 18, 4, 1, 256, 32768, **_GEMMA3),
    "gemma-3-1b": shape("gemma3_text", 262144, 1152, 6912, 26, 4, 1, 256, 32768, **_GEMMA3),
    "gemma-3-4b": shape(
        *("gemma3_text", 262208, 2560, 10240, 34, 8, 4, 256, 131072), **_GEMMA3_LONG
    ),
    "gemma-3-27b": shape(
        *("gemma3_text", 262208, 5376, 21504, 62, 32, 16, 128, 131072),
        attention_scale=168**-0.5,
        **_GEMMA3_LONG,
    ),
    "gpt-oss-20b": shape(
        *("gpt_oss", 201088, 2880, 2880, 24, 64, 8, 64, 131072), experts=Experts(32, 4), **_GPT_OSS
    ),
    "gpt-oss-120b": shape(
        *("gpt_oss", 201088, 2880, 2880, 36, 64, 8, 64, 131072), experts=Experts(128, 4), **_GPT_OSS
    ),
}

LENGTHS = (8192, 32768, 131072)


def cache_sizes(
    config: ModelConfig, policy: Policy, ratio: float | int, tokens: int
) -> tuple[str, str]:
    """Returns the megabytes of a sequence's cache, plain and under a policy at a ratio."""
    plain = sequence_bytes(config, Vanilla(), tokens)
    if not config.num_full_layers:  # no cache grows with the length
        return f"{plain / 1e6:,.1f}", ""
    small = sequence_bytes(config, policy, tokens, compression_ratio=ratio)
    return f"{plain / 1e6:,.1f}", f"{small / 1e6:,.1f}"
