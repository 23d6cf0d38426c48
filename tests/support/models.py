"""Tiny random models in float64, and their weights for the NumPy oracle."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dms_jax.config import ModelConfig, Rope
from dms_jax.model.transformer import Transformer
from dms_jax.policies.values import AdapterShape
from tests.oracles import transformer as oracle

VOCABULARY = 31


def tiny_config(
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    num_layers: int = 2,
    qk_norm: bool = True,
    biases: bool = False,
    tied: bool = True,
    **fields: Any,
) -> ModelConfig:
    """Returns a config with 8 dims per head; any field can be overridden."""
    return ModelConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=8,
        max_position_embeddings=512,
        rope=Rope(theta=100.0),
        qkv_bias=biases,
        output_bias=biases,
        mlp_bias=biases,
        qk_norm=qk_norm,
        tie_embeddings=tied,
        model_type="qwen3" if qk_norm else "llama",
        **fields,
    )


def random_model(
    config: ModelConfig,
    *,
    adapter: AdapterShape | bool | None = None,
    seed: int = 0,
    biases: float = 0.3,
    dtype: Any = jnp.float64,
) -> Transformer:
    """Returns a model with large weights, so that attention is uneven and decisions vary.

    `biases` is the standard deviation of biases.
    """
    shapes = jax.eval_shape(
        lambda: Transformer(config, adapter=adapter, dtype=dtype, rngs=nnx.Rngs(0))
    )
    random = np.random.default_rng(seed)

    def draw(path, leaf):
        name = jax.tree_util.keystr(path)
        values = random.normal(size=leaf.shape)
        if "norm" in name:
            values = 1 + 0.2 * values
        elif "bias" in name:
            values = biases * values
        elif "kernel" in name:
            inputs = leaf.shape[1:3] if "o_proj" in name else leaf.shape[1:2]
            values = 1.5 * values / np.sqrt(np.prod(inputs))
        elif "lm_head" in name:
            values = values / np.sqrt(leaf.shape[0])
        return jnp.asarray(values, leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def random_tokens(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCABULARY, size=shape).astype(np.int32)


def oracle_weights(model: Transformer) -> oracle.Weights:
    """Returns the same weights, unstacked, for the NumPy transformer."""

    def read(param) -> np.ndarray | None:
        return None if param is None else np.asarray(param[...], np.float64)

    def linear(module, layer):
        if module is None:
            return None
        kernel, bias = read(module.kernel), read(module.bias)
        return oracle.Linear(kernel[layer], None if bias is None else bias[layer])

    def heads(module, layer, part):
        """Returns part of the fused [E, K, G + 2, D] as [E, heads, D]."""
        kernel, bias = read(module.kernel)[layer][..., part, :], read(module.bias)
        flat = (-1, kernel.shape[-1])
        return oracle.Linear(
            kernel.reshape(len(kernel), *flat),
            None if bias is None else bias[layer][..., part, :].reshape(flat),
        )

    def half(module, layer, part):
        """Returns one half of the fused [E, 2, F]."""
        kernel, bias = read(module.kernel), read(module.bias)
        return oracle.Linear(kernel[layer][:, part], None if bias is None else bias[layer][part])

    def norm(module, layer):
        return None if module is None else read(module.scale)[layer]

    layers = model.layers
    attention, mlp, adapter = layers.attention, layers.mlp, layers.adapter
    kinds = model.config.kinds
    return oracle.Weights(
        embedding=read(model.embedding),
        layers=[
            oracle.Layer(
                attention_norm=norm(layers.attention_norm, layer),
                q=heads(attention.qkv_proj, layer, slice(0, -2)),
                k=heads(attention.qkv_proj, layer, slice(-2, -1)),
                v=heads(attention.qkv_proj, layer, slice(-1, None)),
                o=linear(attention.o_proj, layer),
                q_norm=norm(attention.q_norm, layer),
                k_norm=norm(attention.k_norm, layer),
                mlp_norm=norm(layers.mlp_norm, layer),
                gate=half(mlp.gate_up_proj, layer, 0),
                up=half(mlp.gate_up_proj, layer, 1),
                down=linear(mlp.down_proj, layer),
                window=kinds[layer % len(kinds)].window,
                theta=getattr(kinds[layer % len(kinds)].rope, "theta", None),
                adapter_norm=None if adapter is None else norm(adapter.norm, layer),
                adapter=None if adapter is None else linear(adapter.proj, layer),
                adapter_hidden=None if adapter is None else linear(adapter.hidden, layer),
                adapter_late=None if adapter is None else linear(adapter.late, layer),
            )
            for layer in range(model.config.num_layers)
        ],
        final_norm=read(model.final_norm.scale),
        unembedding=read(model.embedding).T if model.lm_head is None else read(model.lm_head),
        epsilon=model.config.rms_norm_eps,
    )
