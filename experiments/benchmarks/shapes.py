"""Models for benchmarks: real shapes, random weights, made on the device."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, get_args

import jax
from flax import nnx

import dms_jax
from dms_jax.command_line import shapes
from dms_jax.config import Experts
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
_POSITIONS = 131072
_KNOWN = [name for name in get_args(Shape) if name in shapes.SHAPES]
_OWN: dict[str, dms_jax.ModelConfig] = {
    "qwen2.5-0.5b": shapes.shape(
        *("qwen2", 151936, 896, 4864, 24, 14, 2, 64, _POSITIONS), tie_embeddings=True
    ),
    "qwen2.5-1.5b": shapes.shape(
        *("qwen2", 151936, 1536, 8960, 28, 12, 2, 128, _POSITIONS), tie_embeddings=True
    ),
    "tiny": shapes.shape("llama", 512, 64, 128, 2, 4, 2, 16, _POSITIONS),
    "tiny-experts": shapes.shape(
        *("qwen3_moe", 512, 64, 64, 2, 4, 2, 16, _POSITIONS), experts=Experts(8, 2)
    ),
    "tiny-windows": dataclasses.replace(
        shapes.SHAPES["gpt-oss-20b"],
        **dict(vocab_size=512, hidden_size=64, intermediate_size=64, num_layers=4, num_heads=4),
        **dict(num_kv_heads=2, head_dim=16, experts=Experts(4, 2), window=32),
    ),
}


def fields_of(config: dms_jax.ModelConfig) -> dict[str, Any]:
    """Returns the fields of config.json of a shape, with positions for every context."""
    return dataclasses.replace(config, max_position_embeddings=_POSITIONS).to_hf()


SHAPES: dict[str, dict[str, Any]] = {
    name: fields_of(config)
    for name, config in ({name: shapes.SHAPES[name] for name in _KNOWN} | _OWN).items()
}


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
    heads = config_of(shape).num_kv_heads
    for size in model_parallel:
        if heads % size:
            fit = [str(each) for each in range(1, heads + 1) if heads % each == 0]
            raise dms_jax.ConfigError(
                f"{shape} has {heads} KV heads, which {size} devices cannot share: give "
                f"--model-parallel {', '.join(fit[:-1])} or {fit[-1]}."
            )


def config_of(shape: Shape) -> dms_jax.ModelConfig:
    """Returns the architecture of a shape."""
    return dms_jax.ModelConfig.from_hf(SHAPES[shape])


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
    config = dms_jax.ModelConfig.from_hf(fields)

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
