"""The program of a training step, and the shape, type and sharding of its arguments.

It holds no arrays. A `Trainer` runs it; `dms_jax.plan` adds up its shapes.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import (
    AbstractMesh,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

from dms_jax import sharding
from dms_jax.config import ModelConfig
from dms_jax.model import low_rank
from dms_jax.model.transformer import Transformer
from dms_jax.policies import Policy
from dms_jax.training.parameters import (
    is_adapter,
    is_low_rank,
    rebuilder,
    shapes,
    shardings,
    split,
)
from dms_jax.training.recipe import Recipe
from dms_jax.training.remat import Room, choose_remat, holds_constants
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

Struct = jax.ShapeDtypeStruct


class StepProgram:
    """The optimizer step of a run; all trees below hold `jax.ShapeDtypeStruct`s with shardings.

    Args:
      student: the model to train, with its adapter and low-rank updates; it may be abstract.
      original: the model without low-rank updates, whose structure the teacher has.
      policy: the policy whose decisions apply.
      recipe: the recipe.
      everywhere: the sharding of replicated arrays: replicated on a mesh, or one device.
      memory: bytes of a device; None if unknown.

    Attributes:
      recipe: the recipe, with `remat` chosen by memory (`dms_jax.training.remat`).
      everywhere: the argument.
      places: the sharding of each parameter, by name.
      parameters: the student's parameters, by name.
      rebuild: makes the student from its parameters.
      state: the state that a step changes.
      constants: the frozen parameters and the teacher's other parameters, in the type of the
        passes.
      number: the type of losses and rates.
      shards: the layout of the parameters over the mesh.
    """

    def __init__(
        self,
        student: Transformer,
        original: Transformer,
        policy: Policy,
        recipe: Recipe,
        everywhere: NamedSharding | SingleDeviceSharding,
        *,
        memory: float | None,
    ):
        mesh: Any = everywhere.mesh if isinstance(everywhere, NamedSharding) else None
        self._mesh = mesh
        self.recipe, self.everywhere, self._policy = recipe, everywhere, policy
        self.rebuild, self._rebuild_teacher = rebuilder(student), rebuilder(original)
        arrays = shapes(student)
        self.places: dict[str, Any] = dict.fromkeys(arrays, everywhere)
        if mesh is not None:
            self.places = shardings(student, mesh, sharding.TRAINING_RULES)
        self.parameters = {
            name: Struct(x.shape, x.dtype, sharding=self.places[name]) for name, x in arrays.items()
        }
        trained, frozen = self.split(self.parameters)
        room = Room(
            student.config,
            parameters=sum(x.size for x in self.parameters.values()),
            trained=sum(x.size for x in trained.values()),
            shards=sharding.mesh_sizes(mesh),
            memory=memory,
        )
        self.recipe = choose_remat(recipe, room)
        wide = {
            name: x.update(dtype=jnp.promote_types(x.dtype, jnp.float32))
            for name, x in trained.items()
        }
        self.number = jnp.result_type(*(x.dtype for x in wide.values()))
        self.state = self._abstract_state(wide)
        teacher = {}
        if recipe.loss == "distillation":
            own = (name for name in wide if not is_adapter(name) and not is_low_rank(name))
            teacher = {name: wide[name] for name in own}
        if recipe.compute_dtype is not None:
            narrow = jnp.dtype(recipe.compute_dtype)
            frozen = {n: x if is_adapter(n) else x.update(dtype=narrow) for n, x in frozen.items()}
            teacher = {name: x.update(dtype=narrow) for name, x in teacher.items()}
        self.shards = Shards()
        if mesh is not None:
            together = holds_whole_layers(self.parameters, trained, room.shards[-1], memory)
            # A trainer also keeps frozen parameters in the model's type, if that is another one.
            given = (self.parameters[name] for name in frozen)
            other = (x for x, y in zip(given, frozen.values(), strict=True) if x.dtype != y.dtype)
            held = (*frozen.values(), *teacher.values(), *other)
            constants = sum(x.size * x.dtype.itemsize for x in held)
            if holds_constants(self.recipe, room, constants):
                frozen, teacher = (
                    {
                        name: x.update(sharding=sharding.whole(x.sharding))
                        for name, x in arrays.items()
                    }
                    for arrays in (frozen, teacher)
                )
                for name, x in frozen.items():
                    self.places[name] = x.sharding
                    self.parameters[name] = self.parameters[name].update(sharding=x.sharding)
            taught = {name: x.sharding for name, x in teacher.items()}
            self.shards = Shards(self.places, taught, together)
        self.constants = dict(frozen=frozen, teacher=teacher)

    def split(self, arrays: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Splits the student's parameters into trained and frozen ones."""
        trainable = self.recipe.trained_for(self._policy)
        return split(arrays, adapter=self._policy.retrofit.adapter is not None, trainable=trainable)

    def _abstract_state(self, trained: dict[str, Any]) -> TrainState:
        made = jax.eval_shape(make_optimizer(self.recipe).init, trained)
        state = TrainState(Struct((), jnp.int32), trained, made)

        def placed(path: Any, x: Any) -> Any:
            names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
            place = self.places[names[-1]] if names else self.everywhere
            return Struct(x.shape, x.dtype, sharding=place)

        return jax.tree_util.tree_map_with_path(placed, state)

    @property
    def place_of_passes(self) -> Sharding:
        """The sharding of passes [A, B, T]: sequences over `data`."""
        if self._mesh is None:
            return self.everywhere
        return NamedSharding(self._mesh, PartitionSpec(None, sharding.DATA))

    def jit(self) -> Any:
        """Returns the step of (state, constants, passes, schedule); it donates the state.

        Everything but the state is a plain dictionary of arrays or of their shapes.
        """
        step = TrainingStep(
            self.rebuild,
            self._policy,
            self.recipe,
            rebuild_teacher=self._rebuild_teacher,
            shards=self.shards,
        ).step

        def by_name(state, constants, passes, schedule):
            values = Constants(**constants), Passes(**passes), ScheduleValues(**schedule)
            return step(state, *values)

        kept = jax.tree.map(lambda x: x.sharding, self.state)
        return jax.jit(
            by_name,
            donate_argnums=0,
            out_shardings=(kept, self.everywhere),
            compiler_options=compiler_options(self.everywhere.device_set),
        )


def program_of_shape(
    config: ModelConfig,
    policy: Policy,
    recipe: Recipe,
    mesh: Mesh | AbstractMesh,
    dtype: Any,
    *,
    memory: float | None = None,
) -> StepProgram:
    """Returns the program for a model given only by its shape.

    Args:
      config: the model's shape.
      policy: the policy whose decisions apply.
      recipe: the recipe.
      mesh: the devices, which may be abstract.
      dtype: type of the model's parameters.
      memory: bytes of a device; None if unknown.
    """
    check_split(recipe, policy, mesh)
    updates = recipe.low_rank if recipe.trained_for(policy) == "low_rank" else None
    student, original = (
        low_rank.skeleton(
            config, adapter=policy.retrofit.adapter, low_rank=size, dtype=jnp.dtype(dtype)
        )
        for size in (updates, None)
    )
    # Adapters and low-rank factors are in at least float32.
    student = rebuilder(student)(
        {
            name: x.update(dtype=jnp.promote_types(x.dtype, jnp.float32))
            if is_adapter(name) or is_low_rank(name)
            else x
            for name, x in shapes(student).items()
        }
    )
    everywhere = NamedSharding(mesh, PartitionSpec())
    return StepProgram(student, original, policy, recipe, everywhere, memory=memory)
