"""Shapes of well-known models, as their config.json gives them, for plans that need no weights."""

from typing import Any, Literal, get_args

from dms_jax.config import ModelConfig

Shape = Literal[
    "llama-3.2-1b",
    "llama-2-7b",
    "llama-3.1-8b",
    "llama-3.1-70b",
    "qwen-r1-1.5b",
    "qwen-r1-7b",
    "qwen-r1-32b",
    "qwen3-8b",
]


def _shape(family: str, *sizes: Any, **more: Any) -> ModelConfig:
    """V, E, F, L, H, K, D and positions."""
    return ModelConfig(*sizes, model_type=family, **more)


_QWEN2: dict[str, Any] = dict(qkv_bias=True)
SHAPES: dict[Shape, ModelConfig] = {
    "llama-3.2-1b": _shape("llama", 128256, 2048, 8192, 16, 32, 8, 64, 131072, tie_embeddings=True),
    "llama-2-7b": _shape("llama", 32000, 4096, 11008, 32, 32, 32, 128, 4096),
    "llama-3.1-8b": _shape("llama", 128256, 4096, 14336, 32, 32, 8, 128, 131072),
    "llama-3.1-70b": _shape("llama", 128256, 8192, 28672, 80, 64, 8, 128, 131072),
    "qwen-r1-1.5b": _shape("qwen2", 151936, 1536, 8960, 28, 12, 2, 128, 131072, **_QWEN2),
    "qwen-r1-7b": _shape("qwen2", 152064, 3584, 18944, 28, 28, 4, 128, 131072, **_QWEN2),
    "qwen-r1-32b": _shape("qwen2", 152064, 5120, 27648, 64, 40, 8, 128, 131072, **_QWEN2),
    "qwen3-8b": _shape("qwen3", 151936, 4096, 12288, 36, 32, 8, 128, 40960, qk_norm=True),
}
assert set(SHAPES) == set(get_args(Shape))
