"""The training state and its compiled step, on one device or sharded over a mesh.

On a mesh, parameters and optimizer state are sharded by `sharding.TRAINING_RULES` (every matrix
over `data` and `sequence`, heads and feed-forward over `model`), and sequences over `data`. Frozen
parameters and the teacher's are sharded in the same way, or, if memory allows, only over `model`.
The teacher shares equal arrays with the student, and the trainer keeps no other copy of the model.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from dms_jax import compilation, processes, sharding
from dms_jax.data.batches import Batch
from dms_jax.devices import data_sheet
from dms_jax.model import low_rank
from dms_jax.model.language_model import LanguageModel
from dms_jax.model.transformer import Transformer
from dms_jax.policies import Policy
from dms_jax.training.flops import layer_parameters, peak_operations, token_operations
from dms_jax.training.parameters import (
    Parameters,
    add_adapter,
    parameters,
    zero_borrowed_neurons,
)
from dms_jax.training.program import StepProgram
from dms_jax.training.recipe import Progress, Recipe, eviction_target
from dms_jax.training.step import TrainState, make_optimizer


def _student(
    transformer: Transformer, policy: Policy, recipe: Recipe, key: jax.Array
) -> Transformer:
    """Returns the model to train: with an adapter if the policy reads one, and low-rank updates.

    Existing updates are trained further, or merged if all weights are trained.
    """
    if policy.retrofit.adapter:
        transformer = add_adapter(transformer, policy.retrofit.adapter)
    trained = recipe.trained_for(policy)
    if trained == "all":
        return low_rank.merge(transformer)
    if trained == "low_rank" and low_rank.low_rank_of(transformer) is None:
        factors = low_rank.initial_factors(transformer, recipe.low_rank, key)
        return low_rank.add_factors(transformer, recipe.low_rank, factors)
    return transformer


def rows_here(mesh: Mesh | None, pass_size: int) -> tuple[int, ...]:
    """Returns the indices, in a pass, of the sequences on this process's devices."""
    if mesh is None:
        return tuple(range(pass_size))
    places = NamedSharding(mesh, PartitionSpec(sharding.DATA))
    rows: set[int] = set()
    for index in places.addressable_devices_indices_map((pass_size,)).values():
        rows |= set(range(pass_size)[index[0] if index else slice(None)])
    return tuple(sorted(rows))


def _spread(rows: np.ndarray, place: Any) -> jax.Array:
    """Places passes [A, B, T] on the mesh; this process has some of the B rows."""
    if place.is_fully_addressable:
        return jax.device_put(rows, place)
    return jax.make_array_from_process_local_data(place, rows)


class Trainer:
    """The training state of a run, and the step that advances it.

    Args:
      model: the original model; its arrays are never changed. Without its low-rank updates, if it
        has any, it is also the teacher.
      policy: the policy whose decisions apply.
      recipe: the recipe of the run.
      seed: seed of the noise.
      mesh: mesh of devices; None for one device.
    """

    def __init__(
        self, model: LanguageModel, policy: Policy, recipe: Recipe, seed: int, mesh: Mesh | None
    ):
        compilation.prepare()
        self._policy, self._target = policy, eviction_target(recipe.compression_ratio)
        key = jax.random.key(seed)
        original = low_rank.drop_factors(model.transformer)
        student = _student(model.transformer, policy, recipe, key)
        everywhere: Any = SingleDeviceSharding(next(iter(student.embedding[...].devices())))
        if mesh is not None:
            everywhere = NamedSharding(mesh, PartitionSpec())
        device = data_sheet(next(iter(everywhere.device_set)).device_kind)
        memory = None if device is None else float(device.memory)
        self._program = StepProgram(student, original, policy, recipe, everywhere, memory=memory)
        self._key = jax.device_put(key, everywhere)
        given, taught = parameters(student), parameters(original)
        arrays = self._place(given)
        # In the model's type; `state` creates copies in the optimizer's type.
        self._initial, self._frozen = self._program.split(arrays)
        self._dtypes = {name: x.dtype for name, x in self._initial.items()}
        wanted = self._program.constants
        own = self._place({n: taught[n] for n in wanted["teacher"] if taught[n] is not given[n]})
        teacher = {name: own.get(name, arrays[name]) for name in wanted["teacher"]}
        self._constants: dict[str, Any] = jax.tree.map(
            lambda x, like: jax.device_put(x.astype(like.dtype), like.sharding),
            dict(frozen=self._frozen, teacher=teacher),
            wanted,
        )
        # Without arrays.
        self._skeleton = dataclasses.replace(
            model,
            transformer=jax.eval_shape(lambda: student),
            policy=policy,
            mesh=mesh,
            source=None if recipe.trained_for(policy) == "all" else model.source,
        )
        self._layer_parameters = layer_parameters(self._program.parameters, model.config.experts)
        self._peak = peak_operations(mesh)
        self._frozen_layers = recipe.trained_for(policy) != "all"
        self._has_teacher = recipe.loss == "distillation"
        self._optimizer = make_optimizer(recipe)
        self._state: TrainState | None = None
        self._step = self._program.jit()

    @property
    def recipe(self) -> Recipe:
        """The recipe, with `remat` resolved (`dms_jax.training.remat`)."""
        return self._program.recipe

    @property
    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of the state, to restore a checkpoint."""
        return self._program.state

    def _place(self, arrays: Parameters) -> Parameters:
        return {name: jax.device_put(x, self._program.places[name]) for name, x in arrays.items()}

    @property
    def state(self) -> TrainState:
        """Trained parameters, optimizer state and step.

        Allocated on first read, so that assigning a restored state allocates no second one.
        """
        if self._state is None:
            # Copies, because the step donates them.
            trained = {
                name: jnp.array(x, jnp.promote_types(x.dtype, jnp.float32), copy=True)
                for name, x in self._initial.items()
            }
            self.state = self._init_state(jnp.zeros((), jnp.int32), trained)
        assert self._state is not None
        return self._state

    @state.setter
    def state(self, state: TrainState) -> None:
        self._state = state
        self._initial = {}

    def _init_state(self, step: Any, trained: Parameters) -> TrainState:
        """Returns a state at `step` with fresh moments, sharded like `abstract_state`."""
        state = TrainState(step, trained, self._optimizer.init(trained))
        # Commit every array to its place from the start; otherwise the second step, which gets
        # committed arrays, would be compiled again.
        return jax.tree.map(
            lambda x, like: jax.device_put(x, like.sharding), state, self.abstract_state
        )

    def zero_borrowed_neurons(self) -> None:
        """Sets the borrowed neurons to zero and resets the optimizer state."""
        arrays = zero_borrowed_neurons(
            self.state.parameters, self._policy, self._skeleton.config.windowed
        )
        self.state = self._init_state(self.state.step, arrays)

    def step(self, batches: list[Batch], progress: Progress) -> dict[str, jax.Array]:
        """Runs one optimizer step and returns its metrics, which may still be computing.

        Args:
          batches: this process's rows of each pass (`rows_here`).
          progress: the settings of the step.
        """
        inputs = self._inputs(batches, progress)
        self.state, metrics = self._step(self.state, self._constants, *inputs)
        return metrics

    def step_bytes(self, batches: list[Batch], progress: Progress) -> int | None:
        """Returns the compiler's estimate of a device's bytes for a step; None if unknown."""
        inputs = self._inputs(batches, progress)
        compiled = self._step.lower(self.abstract_state, self._constants, *inputs).compile()
        memory: Any = compiled.memory_analysis()
        if memory is None:
            return None
        # Donated arrays count as arguments and as outputs.
        outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
        return memory.argument_size_in_bytes + outputs + memory.temp_size_in_bytes

    def _inputs(self, batches: list[Batch], progress: Progress) -> tuple[dict[str, Any], ...]:
        """Returns the passes and the values of the schedules."""
        everywhere, dtype = self._program.everywhere, self._program.number
        number = lambda value: processes.put(np.asarray(value, dtype), everywhere)  # noqa: E731
        schedule = dict(
            target=number(progress.target),
            neuron_scale=None if progress.neuron_scale is None else number(progress.neuron_scale),
            learning_rate=number(progress.learning_rate),
            adapter_learning_rate=number(progress.adapter_learning_rate),
            key=self._key,
            supervised=number(self._target) if progress.stage.kind == "supervise" else None,
        )
        passes = {
            key: _spread(np.stack([batch[key] for batch in batches]), self._program.place_of_passes)
            for key in batches[0]
        }
        return passes, schedule

    def utilisation(self, tokens_per_second: float, keys: float, stage: str) -> float | None:
        """Returns the model FLOPs utilisation; None if the devices' peak is unknown.

        Args:
          tokens_per_second: tokens of documents per second, without padding.
          keys: mean number of keys that a token attends to.
          stage: kind of the stage.
        """
        if self._peak is None:
            return None
        operations = token_operations(
            self._skeleton.config,
            self._layer_parameters,
            keys,
            frozen=self._frozen_layers,
            teacher=self._has_teacher,
            stage=stage,
        )
        return operations * tokens_per_second / self._peak

    def model(self) -> LanguageModel:
        """Returns the current student, in the dtypes of the original model.

        Its parameters are sharded as for training, and it shares frozen ones with the trainer.
        `LanguageModel.place` places them for decoding.
        """
        trained = {
            name: jnp.array(x, self._dtypes[name], copy=True)
            for name, x in self.state.parameters.items()
        }
        return dataclasses.replace(
            self._skeleton,
            transformer=self._program.rebuild(self._frozen | trained),
            untrained=False,
        )
