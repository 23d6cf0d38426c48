"""Models that benchmarks time: real shapes, random weights, made on the device."""

from typing import Any, Literal

import jax
from flax import nnx

import dms_jax
from dms_jax.model.transformer import Transformer

Shape = Literal["llama-3.1-8b", "llama-3.2-1b", "qwen3-8b", "qwen2.5-0.5b", "tiny"]
SHAPES: dict[Shape, dict[str, Any]] = {
    "llama-3.1-8b": dict(
        model_type="llama",
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
    ),
    "llama-3.2-1b": dict(
        model_type="llama",
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        tie_word_embeddings=True,
    ),
    "qwen3-8b": dict(
        model_type="qwen3",
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
    ),
    "qwen2.5-0.5b": dict(
        model_type="qwen2",
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    ),
    "tiny": dict(
        model_type="llama",
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    ),
}


def model_of(shape: Shape, dtype: Any) -> dms_jax.LanguageModel:
    """Returns a model of this shape with random weights, made on the device."""
    return random_model(SHAPES[shape], dtype)


def random_model(fields: dict[str, Any], dtype: Any) -> dms_jax.LanguageModel:
    """Returns a model of these fields of config.json with random weights, made on the device."""
    config = dms_jax.ModelConfig.from_hf(
        fields
        | dict(
            max_position_embeddings=131072,
            rms_norm_eps=1e-5,
            rope_theta=500000.0,
            hidden_act="silu",
        )
    )
    make = jax.jit(lambda: Transformer(config, dtype=dtype, rngs=nnx.Rngs(0)))
    return dms_jax.LanguageModel(transformer=make())
