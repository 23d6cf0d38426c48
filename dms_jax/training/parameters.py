"""The parameters of a transformer by name: which are trained, and how they are sharded.

A module is a pytree; its parameters by name ("layers.adapter.proj.kernel") are a flat dictionary,
which is split into trained and frozen parameters, passes directly through `jax.grad` and Optax, and
is stored in training checkpoints. `nnx.split` with filters would give nested states, whose paths
checkpoints and sharding rules would have to flatten again.

Two functions change a model: `add_adapter` adds an adapter that starts at zero, and
`zero_borrowed_neurons` clears the borrowed neurons once they have decayed. With zero rows in the
projections, every decision logit starts at minus its offset; rows that are only ignored would
saturate the decisions at random.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from dms_jax import sharding
from dms_jax.model import low_rank
from dms_jax.model.transformer import Transformer
from dms_jax.policies import Policy
from dms_jax.policies.values import AdapterShape

Parameters = dict[str, jax.Array]
Trained = Literal["adapter", "low_rank", "all"]
Rebuild = Callable[[Mapping[str, Any]], Transformer]

_ADAPTER = "layers.adapter."


def _named(transformer: nnx.Module) -> list[tuple[str, nnx.Param]]:
    leaves = jax.tree_util.tree_leaves_with_path(
        transformer, is_leaf=lambda x: isinstance(x, nnx.Variable)
    )
    return [
        (jax.tree_util.keystr(path, simple=True, separator="."), param) for path, param in leaves
    ]


def parameters(transformer: nnx.Module) -> Parameters:
    """Returns the parameters by name."""
    return {name: param.get_value() for name, param in _named(transformer)}


def shapes(transformer: nnx.Module) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes and types of the parameters of a transformer, which may be abstract."""
    return {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype)
        for name, param in _named(transformer)
        for x in [param.get_value()]
    }


def rebuilder(transformer: nnx.Module) -> Rebuild:
    """Returns the inverse of `parameters`: a function from arrays to such a transformer."""
    names = [name for name, _ in _named(transformer)]
    structure = jax.tree.structure(transformer)
    return lambda arrays: jax.tree.unflatten(structure, [arrays[name] for name in names])


def shardings(
    transformer: nnx.Module, mesh: Mesh | AbstractMesh, rules: sharding.Rules
) -> dict[str, NamedSharding]:
    """Returns the sharding of each parameter on a mesh.

    Only the model's matrices are split over `data`. Norms, biases, adapters and low-rank factors
    are small; gathering each of them in every layer would take longer than one sum at the end.
    """
    small = dict(rules) | {"embed": None, "head_dim": None}
    return {
        name: sharding.parameter_sharding(
            mesh,
            param.axes,
            param.shape,
            rules if decays(name) and not is_adapter(name) and not is_low_rank(name) else small,
        )
        for name, param in _named(transformer)
    }


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to the decision adapters."""
    return name.startswith(_ADAPTER)


def is_low_rank(name: str) -> bool:
    """Whether a parameter is a factor of a low-rank update."""
    return low_rank.is_factor(tuple(name.split(".")))


def decays(name: str) -> bool:
    """Whether weight decay applies to a parameter: to matrices, not to norms and biases."""
    return not name.endswith((".scale", ".bias"))


def add_adapter(
    transformer: Transformer,
    shape: AdapterShape = AdapterShape(),  # noqa: B008
) -> Transformer:
    """Returns the transformer with decision adapters of this shape, added if needed.

    New adapters output zero (only hidden units are random). The other parameters are shared with
    the original.
    """
    if transformer.adapter_shape == shape:
        return transformer
    config = transformer.config
    dtype = jnp.promote_types(transformer.embedding[...].dtype, jnp.float32)
    # Abstract: only the adapters get new arrays.
    skeleton = low_rank.skeleton(
        config, adapter=shape, low_rank=low_rank.low_rank_of(transformer), dtype=dtype
    )
    arrays = {name: x for name, x in parameters(transformer).items() if not is_adapter(name)}
    for name, param in _named(skeleton):
        if name.endswith("adapter.hidden.kernel"):
            drawn = jax.random.normal(jax.random.key(0), param.shape, dtype)
            arrays[name] = drawn / math.sqrt(config.hidden_size)
        elif is_adapter(name):
            make = jnp.ones if name.endswith("norm.scale") else jnp.zeros
            arrays[name] = make(param.shape, dtype)
    return rebuilder(skeleton)(arrays)


def zero_borrowed_neurons(
    arrays: Parameters, policy: Policy, windowed: Sequence[bool]
) -> Parameters:
    """Returns the parameters with the weights of the borrowed neurons set to zero.

    Args:
      arrays: the parameters.
      policy: the policy that borrows them.
      windowed: whether each layer has a window; layers with one lend no neuron.
    """

    def of_head(x: jax.Array) -> jax.Array:
        """Clears one group [L, E, G + 2, D]: its query heads, its key and its value."""
        q, k = policy.clear_borrowed(x[..., :-2, :], x[..., -2:-1, :])
        return jnp.concatenate([q, k, x[..., -1:, :]], axis=-2)

    arrays = dict(arrays)
    for name in ("layers.attention.qkv_proj.kernel", "layers.attention.qkv_proj.bias"):
        if name in arrays:  # [L, E, K, G + 2, D] and [L, K, G + 2, D]
            array = arrays[name]
            shape = (array.shape[0], -1, *array.shape[-3:])
            cleared = jax.vmap(of_head, in_axes=2, out_axes=2)(array.reshape(shape))
            cleared = cleared.reshape(array.shape)
            if any(windowed):
                keeps = jnp.asarray(windowed).reshape(-1, *[1] * (array.ndim - 1))
                cleared = jnp.where(keeps, array, cleared)
            arrays[name] = jax.device_put(cleared, array.sharding)
    return arrays


def split(
    arrays: Mapping[str, Any], *, adapter: bool, trainable: Trained
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits parameters, or their shapes, into trained and frozen ones.

    Args:
      arrays: the parameters.
      adapter: whether the adapters are trained.
      trainable: which other parameters are trained: "adapter" none, "low_rank" the factors of
        low-rank updates, "all" every one.
    """

    def is_trained(name: str) -> bool:
        if is_adapter(name):
            return adapter
        return trainable == "all" or (trainable == "low_rank" and is_low_rank(name))

    trained = {name: array for name, array in arrays.items() if is_trained(name)}
    return trained, {name: x for name, x in arrays.items() if name not in trained}


def cast(arrays: Parameters, dtype: Any) -> Parameters:
    """Casts parameters for a pass, except the adapter, whose output is thresholded."""
    if dtype is None:
        return arrays
    return {name: x if is_adapter(name) else x.astype(dtype) for name, x in arrays.items()}
