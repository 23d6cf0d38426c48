"""Grouped-query conversion of a checkpoint (Ainslie et al., arXiv 2305.13245, section 2.1).

The K key and value heads of every layer become K' by averaging their projection matrices group by
group; every query head is kept, and reads the averaged head of its group:

    W'_k[j] = mean of W_k[i] for i in [j K/K', (j + 1) K/K'),    W_v and the biases alike

The cache shrinks by K / K' with any policy. The converted model is worse until it is trained
further with the language modelling loss ("uptraining"; DMC's Table 1 uses the same number of tokens
as for DMC). Where keys are normalised per head (Qwen3), the inputs of the norm are averaged; its
scale is already shared by all heads.
"""

import dataclasses
import functools
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from dms_jax import compilation, sharding
from dms_jax.checks import Count, check
from dms_jax.errors import ConfigError
from dms_jax.model.language_model import LanguageModel, check_model
from dms_jax.model.low_rank import merge
from dms_jax.model.transformer import Transformer


def to_grouped_query(model: LanguageModel, num_kv_heads: int) -> LanguageModel:
    """Averages the KV heads of a model into fewer.

    Args:
      model: a model that was not retrofitted for a policy.
      num_kv_heads: K', a proper divisor of the model's K.

    Returns:
      The converted model, which shares unchanged arrays with the original.

    Raises:
      ConfigError: if K' is not a proper divisor of K, or the model has decisions per KV head,
        which cannot be averaged.
    """
    compilation.prepare()
    check_model(model)
    config, transformer = model.config, merge(model.transformer)
    old = config.num_kv_heads
    smaller = [str(size) for size in range(1, old) if old % size == 0]
    choices = (
        f"the model has {old} KV heads, which become "
        f"{' or '.join(smaller) if smaller else 'no fewer'} by averaging equal groups"
    )
    num_kv_heads = check("to_grouped_query: num_kv_heads", num_kv_heads, Annotated[Count, choices])
    if num_kv_heads >= old or old % num_kv_heads:
        raise ConfigError(f"to_grouped_query: {choices}; {num_kv_heads} were asked for.")
    if model.policy.retrofit.needed or transformer.has_adapter:
        raise ConfigError(
            f"to_grouped_query: this model was retrofitted for {model.policy}, whose decisions "
            "belong to single KV heads. Convert the original first, and retrofit the result."
        )
    if config.qk_norm_over == "heads":
        raise ConfigError(
            f"to_grouped_query: a {config.model_type} norms the keys of all KV heads together, and "
            "has no norm for fewer."
        )
    config = dataclasses.replace(config, num_kv_heads=num_kv_heads)
    skeleton = jax.eval_shape(lambda: Transformer(config, dtype=model.dtype, rngs=nnx.Rngs(0)))
    projection = transformer.layers.attention.qkv_proj
    fused = {"kernel": projection.kernel, "bias": projection.bias}
    leaves = []
    for (path, param), (_, given) in zip(_params(skeleton), _params(transformer), strict=True):
        value = given[...]
        if path.endswith(("qkv_proj.kernel", "qkv_proj.bias")):
            value = _regroup(fused[path.rpartition(".")[2]][...], num_kv_heads)
        elif path.endswith("attention.sinks"):  # per query head; query heads and their order stay
            value = value.reshape(param.shape)
        if model.mesh is not None:
            place = sharding.parameter_sharding(
                model.mesh, param.axes, param.shape, sharding.DECODING_RULES
            )
            value = jax.device_put(value, place)
        leaves.append(value)
    converted = jax.tree.unflatten(jax.tree.structure(skeleton), leaves)
    return dataclasses.replace(model, transformer=converted)


def _params(transformer: Transformer) -> list[tuple[str, Any]]:
    """Returns every parameter with its path."""
    leaves = jax.tree_util.tree_leaves_with_path(
        transformer, is_leaf=lambda x: isinstance(x, nnx.Variable)
    )
    return [(jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in leaves]


@functools.partial(jax.jit, static_argnames="num_kv_heads")
def _regroup(
    fused: Float[Array, "*stack K parts D"], num_kv_heads: int
) -> Float[Array, "*stack fewer more D"]:
    """Averages keys and values of neighbouring KV heads, and concatenates their queries.

    # K=4 groups (q0 k0 v0) ... (q3 k3 v3), K'=2:
    # Out: (q0 q1 mean(k0, k1) mean(v0, v1)), (q2 q3 mean(k2, k3) mean(v2, v3))
    """
    *stack, heads, parts, head_dim = fused.shape
    joined = heads // num_kv_heads
    grouped = fused.reshape(*stack, num_kv_heads, joined, parts, head_dim)
    queries = grouped[..., :-2, :].reshape(*stack, num_kv_heads, joined * (parts - 2), head_dim)
    wide = jnp.promote_types(fused.dtype, jnp.float32)
    pooled = grouped[..., -2:, :].astype(wide).mean(-3).astype(fused.dtype)
    return jnp.concatenate([queries, pooled], axis=-2)
