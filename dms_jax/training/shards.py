"""How the passes of a training step see parameters and sequences that are split over `data`.

The gradients are computed inside `jax.shard_map` over `data`: every device runs its own sequences,
and each collective of FSDP is one that is written here or in `dms_jax.sharding`:

    matrices of the layers   gathered one layer at a time, in the type of the passes, and again in
                             the backward pass; gradients reduce-scattered in at least float32
    output matrix            gathered once a pass; its gradient reduce-scattered once
    embedding                never gathered: hidden states are exchanged (`layers.look_up`)
    norms, biases, adapters  on every device; gradients summed once a step

so that the bytes of a device depend on its own tokens, and not on how many devices there are. Where
memory allows, a step of several passes gathers the layers once, and reduces their gradients once.
The axis `model` is left to the partitioner.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
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
      whole_layers: whether every device holds all layers, and their gradients, during a step of
        several passes.
    """

    places: Mapping[str, NamedSharding]
    whole_layers: bool = False

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

    def gather_layers(self, arrays: Mapping[str, jax.Array], dtype: Any) -> dict[str, jax.Array]:
        """Returns the parameters with whole matrices of all layers in the type of the passes."""
        return {
            name: sharding.gather(x, axis, dtype) if self._of_layers(name) else x
            for name, x in arrays.items()
            for axis in [self.axis(name) or 0]
        }

    def scatter_layers(self, gradient: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Returns the gradient with this device's shards of the sums of whole matrices."""
        return {
            name: sharding.scatter(x, axis) if self._of_layers(name) else x
            for name, x in gradient.items()
            for axis in [self.axis(name) or 0]
        }

    def _of_layers(self, name: str) -> bool:
        return name.startswith(_LAYERS) and self.axis(name) is not None

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

        The function takes (trained, frozen, teacher, passes, places, ...) and returns the gradients
        of the trained parameters and other sums. Passes and places are [A, B, ...]; what comes
        after them is the same for all shards.
        """
        if not self.over_data:
            return function

        def mapped(*arguments):
            trained, frozen, teacher, *rest = arguments
            parameters = [self._specs(arrays) for arrays in (trained, frozen, teacher)]
            sequences = [PartitionSpec(None, sharding.DATA)] * 2
            mesh = next(iter(self.places.values())).mesh
            return jax.shard_map(
                summed,
                in_specs=(*parameters, *sequences, *[PartitionSpec()] * (len(rest) - 2)),
                out_specs=(parameters[0], PartitionSpec()),
                # A kernel takes whole arrays, so an axis of one device is not left for later.
                axis_names={sharding.DATA}
                | {name for name, size in mesh.shape.items() if size == 1},
                check_vma=False,
            )(*arguments)

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
