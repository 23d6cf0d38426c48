"""How the passes of a training step see parameters and sequences that are split over `data`.

The gradients are computed inside `jax.shard_map` over `data`: every device runs its own sequences,
and each collective of FSDP is one that is written here or in `dms_jax.sharding`:

    matrices of the layers   gathered one layer at a time, in the type of the passes, and again in
                             the backward pass; gradients reduce-scattered in at least float32
    output matrix            gathered once a pass; its gradient reduce-scattered once
    embedding                never gathered: hidden states are exchanged (`layers.look_up`)
    norms, biases, adapters  on every device; gradients summed once a step

so that the bytes of a device depend on its own tokens, and not on how many devices there are.
The axis `model` is left to the partitioner.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from dms_jax import sharding
from dms_jax.model.transformer import Layer

_LAYERS = "layers."


@dataclasses.dataclass(frozen=True)
class Shards:
    """The layout of the parameters of student and teacher, by name.

    Attributes:
      places: the sharding of each parameter; empty on one device.
    """

    places: Mapping[str, NamedSharding]

    @property
    def over_data(self) -> bool:
        """Whether there are several shards of sequences."""
        return any(place.mesh.shape[sharding.DATA] > 1 for place in self.places.values())

    def axis(self, name: str) -> int | None:
        """Returns the axis of a parameter that is split over `data`; None if it is not."""
        if not self.over_data or sharding.DATA not in self.places[name].spec:
            return None
        return self.places[name].spec.index(sharding.DATA)

    def whole(self, arrays: Mapping[str, jax.Array], name: str, dtype: Any) -> jax.Array:
        """Returns a parameter in the type of the passes, as a constant, from its shards."""
        array, axis = jax.lax.stop_gradient(arrays[name]), self.axis(name)
        return array.astype(dtype) if axis is None else sharding.gather(array, axis, dtype)

    def gather_layer(self, layer: Layer, dtype: Any) -> Layer:
        """Returns a layer with whole matrices in the type of the passes."""
        named = jax.tree_util.tree_leaves_with_path(
            layer, is_leaf=lambda x: isinstance(x, nnx.Variable)
        )
        arrays = []
        for path, param in named:
            name = _LAYERS + jax.tree_util.keystr(path, simple=True, separator=".")
            axis = self.axis(name)  # with the axis of the layers, which a layer does not have
            array = param[...]
            arrays.append(array if axis is None else sharding.gather(array, axis - 1, dtype))
        return jax.tree.unflatten(jax.tree.structure(layer), arrays)

    def map(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `function` over shards of the sequences, with its sums over all of them.

        The function takes (trained, constants, passes, places, ...) and returns the gradients of
        the trained parameters and other sums. Passes and places are [A, B, ...]; what comes after
        them is the same for all shards.
        """
        if not self.over_data:
            return function

        def mapped(trained, constants, passes, places, *rest):
            specs = functools.partial(jax.tree.map, lambda _: PartitionSpec())
            mesh = next(iter(self.places.values())).mesh
            sequences = jax.tree.map(
                lambda _: PartitionSpec(None, sharding.DATA), (passes, places)
            )
            frozen, teacher = self._specs(constants.frozen), self._specs(constants.teacher)
            of_constants = dataclasses.replace(constants, frozen=frozen, teacher=teacher)
            of_trained = self._specs(trained)
            # A kernel takes whole arrays, so an axis of one device is not left to the partitioner.
            axes = {name for name in mesh.axis_names if mesh.shape[name] == 1} | {sharding.DATA}
            return jax.shard_map(
                summed,
                in_specs=(of_trained, of_constants, *sequences, *(specs(x) for x in rest)),
                out_specs=(of_trained, PartitionSpec()),
                axis_names=axes,
                check_vma=False,
            )(trained, constants, passes, places, *rest)

        def summed(*arguments):
            gradient, others = function(*arguments)
            split = {name: x for name, x in gradient.items() if self.axis(name) is not None}
            copies = {name: x for name, x in gradient.items() if name not in split}
            copies, others = jax.lax.psum((copies, others), sharding.DATA)
            return split | copies, others

        return mapped

    def _specs(self, arrays: Mapping[str, Any]) -> dict[str, PartitionSpec]:
        """Returns how `shard_map` splits parameters: over `data` alone."""
        specs = {}
        for name in arrays:
            axis = self.axis(name)
            before = () if axis is None else (None,) * axis + (sharding.DATA,)
            specs[name] = PartitionSpec(*before)
        return specs
