"""The trainer's step for abstract parameters: shapes, types and shardings, no array.

What the step takes is that of a `Trainer` (a test compares the two), and it is made of the same
parts: the split into trained and frozen parameters, the optimizer and `TrainingStep`.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dms_jax import sharding
from dms_jax.config import ModelConfig
from dms_jax.model import low_rank
from dms_jax.policies import Policy
from dms_jax.training.parameters import (
    Parameters,
    Trained,
    cast,
    is_adapter,
    is_low_rank,
    rebuilder,
    shardings,
    split,
)
from dms_jax.training.recipe import Recipe, Stage
from dms_jax.training.remat import choose_remat
from dms_jax.training.shards import Shards, check_split, holds_whole_layers
from dms_jax.training.step import (
    Constants,
    Passes,
    ScheduleValues,
    TrainingStep,
    TrainState,
    make_optimizer,
)
from dms_jax.training.xla_options import compiler_options


@dataclasses.dataclass(frozen=True)
class StepInputs:
    """What a step takes: the leaves of each argument, as `jax.ShapeDtypeStruct`s with shardings.

    Attributes:
      state: parameters that are trained, and the optimizer's state; by path.
      constants: frozen parameters, and the teacher's that are not among them; by path.
      passes: the sequences; by path.
      schedule: the values of the schedules; by path.
      structures: the structures of the four.
    """

    state: dict[str, Any]
    constants: dict[str, Any]
    passes: dict[str, Any]
    schedule: dict[str, Any]
    structures: tuple[Any, ...]

    @property
    def arguments(self) -> tuple[dict[str, Any], ...]:
        """The four, in the order of the step."""
        return self.state, self.constants, self.passes, self.schedule


class AbstractStep:
    """The step of a retrofit or training of a model that need not exist.

    Args:
      config: the model's shape.
      policy: the policy whose decisions apply.
      recipe: the recipe.
      mesh: the devices, which may be abstract.
      dtype: type of the model's parameters on disk.
      memory: bytes of a device; None if that is not known.

    Attributes:
      policy: the policy.
      recipe: the recipe, with what memory decides.
      devices: number of devices.
      parameters: all parameters by name.
    """

    def __init__(
        self,
        config: ModelConfig,
        policy: Policy,
        recipe: Recipe,
        mesh: Mesh,
        dtype: Any,
        *,
        memory: float | None = None,
    ):
        check_split(recipe, policy, mesh)
        self._memory = memory
        self.policy, self.devices = policy, mesh.size
        self._mesh = mesh
        trained = recipe.trained_for(policy)
        updates = recipe.low_rank if trained == "low_rank" else None
        make = lambda size: low_rank.skeleton(  # noqa: E731
            config, adapter=policy.retrofit.adapter, low_rank=size, dtype=jnp.dtype(dtype)
        )
        self._transformer, self._original = make(updates), make(None)
        places = shardings(self._transformer, mesh, sharding.TRAINING_RULES)
        leaves = jax.tree.leaves(self._transformer)
        self.parameters = {
            name: jax.ShapeDtypeStruct(leaf.shape, _dtype(name, leaf.dtype), sharding=place)
            for (name, place), leaf in zip(places.items(), leaves, strict=True)
        }
        count = lambda arrays: sum(x.size for x in arrays.values())  # noqa: E731
        self.recipe = choose_remat(
            recipe,
            config,
            parameters=count(self.parameters),
            trained=count(self._trained(trained)),
            shards=sharding.mesh_sizes(mesh),
            memory=memory,
        )

    def inputs(self, stage: Stage) -> StepInputs:
        """Returns what a step of a stage takes."""
        recipe, policy = self.recipe, self.policy
        size = recipe.pass_size(self._mesh.shape[sharding.DATA])
        count = (stage.batch_size or recipe.batch_size) // size
        shape = (count, size, recipe.sequence_length)

        structures: list[Any] = []

        def make(arrays: Parameters) -> list[dict[str, jax.Array]]:
            parts = split(
                arrays,
                adapter=policy.retrofit.adapter is not None,
                trainable=recipe.trained_for(policy),
            )
            trained = {
                name: x.astype(jnp.promote_types(x.dtype, jnp.float32))
                for name, x in parts.trained.items()
            }
            teacher = {}
            if recipe.loss == "distillation":
                names = [name for name in trained if not is_adapter(name) and not is_low_rank(name)]
                source = trained if recipe.compute_dtype is None else arrays
                teacher = {name: source[name] for name in names}
            number = jnp.zeros((), jnp.result_type(*(x.dtype for x in trained.values())))
            ids = jnp.zeros(shape, jnp.int32)
            made = (
                TrainState(jnp.zeros((), jnp.int32), trained, make_optimizer(recipe).init(trained)),
                Constants(
                    frozen=cast(parts.frozen, recipe.compute_dtype),
                    teacher=cast(teacher, recipe.compute_dtype),
                ),
                Passes(ids, ids > 0, ids if recipe.packing == "first_fit" else None),
                ScheduleValues(
                    target=number,
                    neuron_scale=number if stage.kind == "neuron_decay" else None,
                    learning_rate=number,
                    adapter_learning_rate=number,
                    key=jax.random.key(0),
                    supervised=number if stage.kind == "supervise" else None,
                ),
            )
            structures.extend(map(jax.tree.structure, made))
            return list(map(_by_path, made))

        arguments = [
            {path: self._place(path, x) for path, x in argument.items()}
            for argument in jax.eval_shape(make, self.parameters)
        ]
        return StepInputs(*arguments, structures=tuple(structures))

    def lower(self, inputs: StepInputs) -> Any:
        """Returns the step as it is lowered for the mesh's devices, to be compiled."""
        step = TrainingStep(
            rebuilder(self._transformer),
            self.policy,
            self.recipe,
            rebuild_teacher=rebuilder(self._original),
            shards=self._shards(),
        ).step

        def by_path(*arguments: dict[str, jax.Array]) -> tuple[dict[str, jax.Array], Any]:
            """The step on leaves, because only arrays go into its classes."""
            pairs = zip(inputs.structures, arguments, strict=True)
            state, metrics = step(*(jax.tree.unflatten(s, list(x.values())) for s, x in pairs))
            return _by_path(state), metrics

        kept = {path: x.sharding for path, x in inputs.state.items()}
        replicated = NamedSharding(self._mesh, PartitionSpec())
        devices = list(self._mesh.devices.flat)
        compiled = jax.jit(
            by_path,
            donate_argnums=0,
            out_shardings=(kept, replicated),
            compiler_options=compiler_options(devices),
        )
        platform = str(devices[0].platform).replace("gpu", "cuda")
        with jax.set_mesh(self._mesh):
            traced = compiled.trace(*inputs.arguments)
            return traced.lower(lowering_platforms=(platform,))

    def _shards(self) -> Shards:
        """Returns the layout that a trainer chooses."""
        trained = self._trained(self.recipe.trained_for(self.policy))
        model = sharding.mesh_sizes(self._mesh)[2]
        whole = holds_whole_layers(self.parameters, trained, model, self._memory)
        return Shards({name: x.sharding for name, x in self.parameters.items()}, whole)

    def _trained(self, trainable: Trained) -> dict[str, Any]:
        """Returns the parameters that are trained."""
        adapter = self.policy.retrofit.adapter is not None
        return jax.eval_shape(
            lambda arrays: split(arrays, adapter=adapter, trainable=trainable).trained,
            self.parameters,
        )

    def _place(self, path: str, x: Any) -> Any:
        """Adds the sharding: that of its parameter, sequences over `data`, or on every device."""
        name = path.partition("['")[2].removesuffix("']")
        if name:
            place = self.parameters[name].sharding
        else:
            sequences = x.ndim == 3
            spec = PartitionSpec(None, sharding.DATA) if sequences else PartitionSpec()
            place = NamedSharding(self._mesh, spec)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)


def _by_path(tree: Any) -> dict[str, Any]:
    """Returns the leaves of a tree by their path, in its order."""
    return {
        f"{place:04d}{jax.tree_util.keystr(path)}": leaf
        for place, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(tree))
    }


def _dtype(name: str, dtype: Any) -> Any:
    """Adapters and low-rank factors are in at least float32."""
    wide = is_adapter(name) or is_low_rank(name)
    return jnp.promote_types(dtype, jnp.float32) if wide else dtype


def bytes_a_device(tree: Any) -> int:
    """Returns the bytes that the arrays of a tree take on one device."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )
