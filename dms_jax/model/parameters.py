"""The parameters of a transformer by their paths: `("layers", "mlp", "down_proj", "kernel")`."""

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from dms_jax import sharding
from dms_jax.model.transformer import Transformer

Path = tuple[Any, ...]


def parameters_of(transformer: Transformer) -> dict[Path, nnx.Param]:
    """Returns the parameters of a transformer, which may be abstract."""
    return dict(nnx.to_flat_state(nnx.state(transformer, nnx.Param)))


def arrays_of(transformer: Transformer) -> dict[Path, jax.Array]:
    """Returns the values of the parameters."""
    return {path: param.get_value() for path, param in parameters_of(transformer).items()}


def with_arrays(transformer: Transformer, arrays: Mapping[Path, jax.Array]) -> Transformer:
    """Returns such a transformer with these values; arrays of other paths are not used."""
    graph, state = nnx.split(transformer)
    filled = [(path, param.replace(arrays[path])) for path, param in nnx.to_flat_state(state)]
    return nnx.merge(graph, nnx.from_flat_state(filled))


def place_of(
    param: nnx.Param,
    mesh: jax.sharding.Mesh | None,
    rules: sharding.Rules = sharding.DECODING_RULES,
) -> jax.sharding.NamedSharding | None:
    """Returns the sharding of a parameter, which may be abstract; None without a mesh."""
    if mesh is None:
        return None
    axes, shape = param.get_metadata("axes"), param.get_value().shape
    return sharding.parameter_sharding(mesh, axes, shape, rules)
