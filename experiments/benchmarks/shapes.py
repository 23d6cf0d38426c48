"""Models for benchmarks: real shapes, random weights, made on the device."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
from flax import nnx

import dms_jax
from dms_jax.model.transformer import Transformer
from dms_jax.policies import Policy
from dms_jax.sharding import DECODING_RULES
from dms_jax.training.parameters import add_adapter, rebuilder, shardings

Shape = Literal[
    "llama-3.1-8b",
    "llama-3.2-1b",
    "qwen3-8b",
    "qwen2.5-0.5b",
    "qwen2.5-1.5b",
    "qwen3-30b-a3b",
    "gpt-oss-20b",
    "gemma-3-4b",
    "tiny",
    "tiny-experts",
    "tiny-windows",
]


def _fields(family: str, *sizes: int, head_dim: int | None = None, **more: Any) -> dict[str, Any]:
    """Fields of config.json from V, E, F, L, H, K, and others by name."""
    names = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads"
    fields = dict(zip([*names.split(), "num_key_value_heads"], sizes, strict=True))
    own = {} if head_dim is None else {"head_dim": head_dim}
    return {"model_type": family, **fields, **own, **more}


_SLIDING_FIRST = ["sliding_attention", "full_attention"]
SHAPES: dict[Shape, dict[str, Any]] = {
    "llama-3.1-8b": _fields("llama", 128256, 4096, 14336, 32, 32, 8, head_dim=128),
    "llama-3.2-1b": _fields(
        *("llama", 128256, 2048, 8192, 16, 32, 8), head_dim=64, tie_word_embeddings=True
    ),
    "qwen3-8b": _fields("qwen3", 151936, 4096, 12288, 36, 32, 8, head_dim=128),
    "qwen2.5-0.5b": _fields("qwen2", 151936, 896, 4864, 24, 14, 2, tie_word_embeddings=True),
    "qwen2.5-1.5b": _fields("qwen2", 151936, 1536, 8960, 28, 12, 2, tie_word_embeddings=True),
    "qwen3-30b-a3b": _fields(
        *("qwen3_moe", 151936, 2048, 6144, 48, 32, 4),
        head_dim=128,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
    ),
    "gpt-oss-20b": _fields(
        *("gpt_oss", 201088, 2880, 2880, 24, 64, 8),
        head_dim=64,
        num_local_experts=32,
        num_experts_per_tok=4,
        attention_bias=True,
        sliding_window=128,
        layer_types=_SLIDING_FIRST * 12,
    ),
    "gemma-3-4b": _fields(
        *("gemma3_text", 262208, 2560, 10240, 34, 8, 4),
        head_dim=256,
        query_pre_attn_scalar=256,
        sliding_window=1024,
        layer_types=[
            "full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(34)
        ],
        hidden_act="gelu_pytorch_tanh",
        tie_word_embeddings=True,
    ),
    "tiny": _fields("llama", 512, 64, 128, 2, 4, 2, head_dim=16),
    "tiny-experts": _fields(
        *("qwen3_moe", 512, 64, 128, 2, 4, 2),
        head_dim=16,
        moe_intermediate_size=64,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
    ),
    "tiny-windows": _fields(
        *("gpt_oss", 512, 64, 64, 4, 4, 2),
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        attention_bias=True,
        sliding_window=32,
        layer_types=_SLIDING_FIRST * 2,
    ),
}
LLAMA_2_7B = _fields("llama", 32000, 4096, 11008, 32, 32, 32, head_dim=128)
COMMON: dict[str, Any] = dict(
    max_position_embeddings=131072, rms_norm_eps=1e-5, rope_theta=500000.0, hidden_act="silu"
)


def meshes_of(
    model_parallel: Sequence[int], data_parallel: Sequence[int]
) -> dict[tuple[int, int], jax.sharding.Mesh | None]:
    """Returns the mesh of each (data, model), in that order; None for one device.

    Args:
      model_parallel: numbers of devices that heads are split over.
      data_parallel: numbers of devices, or of groups of devices, that sequences are split over.

    Raises:
      ConfigError: there are fewer devices.
    """
    return {
        (data, model): None if data * model == 1 else dms_jax.make_mesh(data, model)
        for data in data_parallel
        for model in model_parallel
    }


def check_heads(shape: Shape, model_parallel: Sequence[int]) -> None:
    """Raises ConfigError unless the devices can share the KV heads of a shape."""
    heads = SHAPES[shape]["num_key_value_heads"]
    for size in model_parallel:
        if heads % size:
            fit = [str(each) for each in range(1, heads + 1) if heads % each == 0]
            raise dms_jax.ConfigError(
                f"{shape} has {heads} KV heads, which {size} devices cannot share: give "
                f"--model-parallel {', '.join(fit[:-1])} or {fit[-1]}."
            )


def config_of(shape: Shape) -> dms_jax.ModelConfig:
    """Returns the architecture of a shape."""
    return dms_jax.ModelConfig.from_hf(COMMON | SHAPES[shape])


def model_of(
    shape: Shape, dtype: Any, mesh: jax.sharding.Mesh | None = None
) -> dms_jax.LanguageModel:
    """Returns a model of this shape with random weights, made on their devices."""
    return random_model(SHAPES[shape], dtype, mesh)


def random_model(
    fields: dict[str, Any], dtype: Any, mesh: jax.sharding.Mesh | None = None
) -> dms_jax.LanguageModel:
    """Returns a model of these fields of config.json with random weights, made on their devices.

    On a mesh each device makes its own part of them.
    """
    config = dms_jax.ModelConfig.from_hf(COMMON | fields)

    def make() -> Transformer:
        return Transformer(config, dtype=dtype, rngs=nnx.Rngs(0))

    if mesh is None:
        return dms_jax.LanguageModel(transformer=jax.jit(make)())
    skeleton = jax.eval_shape(make)
    places = rebuilder(skeleton)(shardings(skeleton, mesh, DECODING_RULES))
    return dms_jax.LanguageModel(transformer=jax.jit(make, out_shardings=places)(), mesh=mesh)


def with_scorer(model: dms_jax.LanguageModel, policy: Policy) -> dms_jax.LanguageModel:
    """Returns the model with the policy's untrained adapter, if it has one."""
    if policy.retrofit.adapter is None:
        return model
    transformer = add_adapter(model.transformer, policy.retrofit.adapter)
    return dataclasses.replace(model, transformer=transformer, policy=policy)
