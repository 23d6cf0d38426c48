"""Sharded parameters and sequences in the passes of a training step.

The gradients are computed inside `jax.shard_map` over `data` and `sequence`: every device runs its
own sequences (or its part of their tokens), and each collective of FSDP is written here or in
`dms_jax.sharding`:

    matrices of the layers   gathered one layer at a time, in the type of the passes, and again in
                             the backward pass; gradients reduce-scattered in at least float32
    output matrix            gathered once a pass; its gradient reduce-scattered once
    embedding                never gathered: hidden states are exchanged (`layers.look_up`)
    norms, biases, adapters  on every device; gradients summed once a step
    keys, values, decisions  gathered over `sequence`, a layer at a time (`model.split_rows`)

so the bytes that a device sends depend on its own tokens, not on the number of devices. If memory
allows, a step of several passes gathers the layers once and reduces their gradients once, and
parameters that no step changes (frozen ones, the teacher's) are whole on every device: nothing of
them is sent (`remat.holds_constants`). The axis `model` is left to the partitioner.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from dms_jax import sharding
from dms_jax.errors import ConfigError
from dms_jax.model.split_rows import PIECES
from dms_jax.model.transformer import Layer
from dms_jax.policies import Policy
from dms_jax.training.recipe import Recipe

_LAYERS = "layers."


def holds_whole_layers(
    everything: Mapping[str, Any], trained: Mapping[str, Any], model: int, memory: float | None
) -> bool:
    """Whether devices hold all layers during a step, because that takes little of their memory.

    Args:
      everything: all parameters of the student, or their shapes.
      trained: the trained parameters.
      model: size of the axis `model`.
      memory: bytes of a device; None if unknown.
    """
    layers, own = (
        sum(x.size for name, x in arrays.items() if name.startswith(_LAYERS))
        for arrays in (everything, trained)
    )
    # In bfloat16, with a teacher beside the trained parameters, and float32 gradients of these.
    return memory is not None and (2 * layers + 6 * own) / model < memory / 8


def check_split(recipe: Recipe, policy: Policy, mesh: Mesh | AbstractMesh | None) -> None:
    """Raises ConfigError if the tokens of the recipe's sequences cannot be split over a mesh."""
    shards = sharding.mesh_sizes(mesh)[1]
    if shards == 1:
        return
    if recipe.supervises:
        raise ConfigError(
            f"{policy.name} learns in the recipe {recipe.name} from the attention of all queries "
            "to each key, and a mesh axis 'sequence' splits the queries. Train on 'data' and "
            "'model' alone."
        )
    if recipe.sequence_length % (PIECES * shards):
        raise ConfigError(
            f"Sequences of {recipe.sequence_length} tokens cannot be split over {shards} devices "
            f"in {PIECES * shards} equal pieces. Set sequence_length to a multiple of "
            f"{PIECES * shards}, or another size of the mesh axis `sequence`."
        )


@dataclasses.dataclass(frozen=True)
class Shards:
    """The layout of the parameters of student and teacher, by name.

    Attributes:
      places: the sharding of each parameter of the student; empty on one device.
      taught: the sharding of the teacher's parameters that differ from the student's.
      whole_layers: whether every device holds all layers, and their gradients, during a step of
        several passes.
    """

    places: Mapping[str, NamedSharding] = dataclasses.field(default_factory=dict)
    taught: Mapping[str, NamedSharding] = dataclasses.field(default_factory=dict)
    whole_layers: bool = False

    @property
    def of_teacher(self) -> "Shards":
        """The layout of the teacher's parameters."""
        return dataclasses.replace(self, places={**self.places, **self.taught})

    @property
    def several(self) -> bool:
        """Whether sequences or their tokens are split."""
        data, sequence, _ = self._sizes
        return data * sequence > 1

    @property
    def of_a_row(self) -> int:
        """The number of shards of a sequence's tokens."""
        return self._sizes[1]

    @property
    def _sizes(self) -> tuple[int, int, int]:
        return sharding.mesh_sizes(next((p.mesh for p in self.places.values()), None))  # pyright: ignore

    def axis(self, name: str) -> int | None:
        """Returns the axis of a parameter that is split over the shards; None for none."""
        if not self.several:
            return None
        for axis, over in enumerate(self.places[name].spec):
            if (names := sharding.together(over)) and {*names} <= _axes(self.places[name].mesh):
                return axis
        return None

    def whole(self, arrays: Mapping[str, jax.Array], name: str, dtype: Any) -> jax.Array:
        """Gathers a parameter in the type of the passes, as a constant."""
        array, axis = jax.lax.stop_gradient(arrays[name]), self.axis(name)
        if axis is None:
            return array.astype(dtype)
        return sharding.gather(array, axis, dtype, parts=self._parts(name))

    def gather_layers(self, arrays: Mapping[str, jax.Array], dtype: Any) -> dict[str, jax.Array]:
        """Gathers the matrices of all layers in the type of the passes."""
        return {
            name: sharding.gather(x, axis, dtype, parts=self._parts(name))
            if self._of_layers(name)
            else x
            for name, x in arrays.items()
            for axis in [self.axis(name) or 0]
        }

    def scatter_layers(self, gradient: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Reduce-scatters the gradients of the layers' matrices."""
        return {
            name: sharding.scatter(x, axis, parts=self._parts(name)) if self._of_layers(name) else x
            for name, x in gradient.items()
            for axis in [self.axis(name) or 0]
        }

    def _of_layers(self, name: str) -> bool:
        return name.startswith(_LAYERS) and self.axis(name) is not None

    def _parts(self, name: str) -> PartitionSpec:
        """Returns the partition of a parameter over the axes of the partitioner."""
        return sharding.whole(self.places[name]).spec

    def gather_layer(self, layer: Layer, dtype: Any) -> Layer:
        """Gathers the matrices of one layer in the type of the passes."""
        named = jax.tree_util.tree_leaves_with_path(
            layer, is_leaf=lambda x: isinstance(x, nnx.Variable)
        )
        arrays = []
        for path, param in named:
            name = _LAYERS + jax.tree_util.keystr(path, simple=True, separator=".")
            axis = self.axis(name)  # counts the layer axis, which a single layer lacks
            array = param[...]
            if axis is not None:
                parts = PartitionSpec(*self._parts(name)[1:])
                array = sharding.gather(array, axis - 1, dtype, parts=parts)
            arrays.append(array)
        return jax.tree.unflatten(jax.tree.structure(layer), arrays)

    def map(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Maps `function` over the shards of the sequences, and sums its results.

        The function takes (trained, frozen, teacher, passes, numbers, values, shard) and returns
        the gradients of the trained parameters and other sums. Passes and numbers are [A, B, ...]
        and split over `data`; `values` is replicated; `shard` is the index of the device's shard of
        each sequence's tokens; None if tokens are not split.
        """
        if not self.several:
            return functools.partial(function, shard=None)
        split_rows = self.of_a_row > 1

        def mapped(trained, frozen, teacher, passes, numbers, values):
            parameters = [self._specs(arrays) for arrays in (trained, frozen)]
            parameters.append(self.of_teacher._specs(teacher))
            sequences = PartitionSpec(None, sharding.DATA)
            mesh = next(iter(self.places.values())).mesh
            shards = PartitionSpec(sharding.SEQUENCE) if split_rows else PartitionSpec()
            return jax.shard_map(
                summed,
                in_specs=(shards, *parameters, sequences, sequences, PartitionSpec()),
                out_specs=(parameters[0], PartitionSpec()),
                # Axes of size one are manual too: kernels take whole arrays.
                axis_names=_axes(mesh) | {name for name, size in mesh.shape.items() if size == 1},
                check_vma=False,
            )(jnp.arange(self.of_a_row), trained, frozen, teacher, passes, numbers, values)

        def summed(shard, *arguments):
            gradient, others = function(*arguments, shard=shard[0] if split_rows else None)
            split = {name: x for name, x in gradient.items() if self.axis(name) is not None}
            copies = {name: x for name, x in gradient.items() if name not in split}
            copies, others = jax.lax.psum((copies, others), sharding.shard_axes())
            return split | copies, others

        return mapped

    def _specs(self, arrays: Mapping[str, Any]) -> dict[str, PartitionSpec]:
        """Returns the partition of parameters over the axes of `shard_map`."""
        specs = {}
        for name in arrays:
            axis = self.axis(name)
            spec = () if axis is None else (None,) * axis + (self.places[name].spec[axis],)
            specs[name] = PartitionSpec(*spec)
        return specs


def _axes(mesh: Any) -> set[str]:
    return {sharding.DATA, sharding.SEQUENCE} & set(mesh.shape)
