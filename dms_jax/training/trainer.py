"""The training state and its compiled step, on one device or sharded over a mesh.

On a mesh, parameters and optimizer state are sharded by `sharding.TRAINING_RULES` (every parameter
over `data`, heads and feed-forward over `model`) and sequences over `data`; the partitioner derives
the collectives of FSDP and tensor parallelism from that.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dms_jax import sharding
from dms_jax.data.batches import Batch
from dms_jax.model import low_rank
from dms_jax.model.language_model import LanguageModel
from dms_jax.model.transformer import Transformer
from dms_jax.policies import Policy
from dms_jax.training.parameters import (
    Parameters,
    add_adapter,
    cast,
    is_adapter,
    is_low_rank,
    parameters,
    rebuilder,
    shardings,
    split,
    zero_borrowed_neurons,
)
from dms_jax.training.recipe import Progress, Recipe
from dms_jax.training.schedules import eviction_target
from dms_jax.training.step import (
    Constants,
    Passes,
    ScheduleValues,
    TrainState,
    make_optimizer,
    make_step,
)
from dms_jax.training.throughput import layer_parameters, peak_operations, token_operations


def _student(
    transformer: Transformer, policy: Policy, recipe: Recipe, key: jax.Array
) -> Transformer:
    """Returns the model to train: with an adapter if the policy reads one, and low-rank updates.

    Updates that the model brings are trained further, or merged if all weights are trained.
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


class Trainer:
    """The training state of a run, and the step that advances it.

    Args:
      model: the original model; its arrays are never changed. Without its low-rank updates, if it
        has any, it is also the teacher.
      policy: the policy whose decisions apply.
      recipe: the recipe of the run.
      seed: seed of the noise.
      mesh: mesh of devices; None for one device.

    Attributes:
      state: trained parameters, optimizer state and step.
    """

    def __init__(
        self, model: LanguageModel, policy: Policy, recipe: Recipe, seed: int, mesh: Mesh | None
    ):
        self._model, self._policy, self._recipe, self._mesh = model, policy, recipe, mesh
        trained_parts = recipe.trained_for(policy)
        self._key = jax.random.key(seed)
        self._original = low_rank.drop_factors(model.transformer)
        transformer = _student(model.transformer, policy, recipe, self._key)
        self._rebuild = rebuilder(transformer)
        self._transformer = transformer
        arrays = self._place(parameters(transformer))
        parts = split(arrays, adapter=policy.retrofit.adapter is not None, trainable=trained_parts)
        self._frozen = parts.frozen
        self._dtypes = {name: x.dtype for name, x in parts.trained.items()}
        # Copies, because the step donates them.
        trained = {
            name: jnp.array(x, jnp.promote_types(x.dtype, jnp.float32), copy=True)
            for name, x in parts.trained.items()
        }
        self.wide = jnp.result_type(*(x.dtype for x in trained.values()))
        distilling = recipe.loss == "distillation"
        needed = [name for name in trained if not is_adapter(name) and not is_low_rank(name)]
        teacher = self._teacher(needed, arrays) if distilling else {}
        if recipe.compute_dtype is None:
            teacher = {name: x.astype(trained[name].dtype) for name, x in teacher.items()}
        self._constants = Constants(
            frozen=cast(parts.frozen, recipe.compute_dtype),
            teacher=cast(teacher, recipe.compute_dtype),
        )
        self._layer_parameters = layer_parameters(transformer)
        self._peak = peak_operations(mesh)
        self._frozen_layers, self._has_teacher = trained_parts != "all", distilling
        self._optimizer = make_optimizer(recipe)
        self.state = self._init_state(jnp.zeros((), jnp.int32), trained)
        step = make_step(self._rebuild, policy, recipe, rebuild_teacher=rebuilder(self._original))
        if mesh is None:
            self._step = jax.jit(step, donate_argnums=0)
        else:
            kept = jax.tree.map(lambda x: x.sharding, self.state)
            self._step = jax.jit(step, donate_argnums=0, out_shardings=(kept, self._replicated))

    @property
    def _replicated(self) -> NamedSharding | None:
        return None if self._mesh is None else NamedSharding(self._mesh, PartitionSpec())

    def _teacher(self, names: list[str], placed: Parameters) -> Parameters:
        """Returns parameters of the original, from those of the student where they are the same."""
        original, student = parameters(self._original), parameters(self._transformer)
        shared = {name: placed[name] for name in names if original[name] is student[name]}
        own = {name: original[name] for name in names if name not in shared}
        return shared | self._place(own)

    def _place(self, arrays: Parameters) -> Parameters:
        if self._mesh is None:
            return arrays
        places = shardings(self._transformer, self._mesh, sharding.TRAINING_RULES)
        return {name: jax.device_put(x, places[name]) for name, x in arrays.items()}

    def _init_state(self, step: Any, trained: Parameters) -> TrainState:
        """Returns a state at `step` with fresh moments, sharded like their parameters."""
        state = TrainState(step, trained, self._optimizer.init(trained))
        if self._mesh is None:
            return state
        return jax.tree.map(
            lambda x: jax.device_put(x, self._replicated) if x.ndim == 0 else x, state
        )

    @property
    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of the state, to restore a checkpoint."""
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), self.state
        )

    def zero_borrowed_neurons(self) -> None:
        """Sets the borrowed neurons to zero and resets the optimizer state."""
        arrays = zero_borrowed_neurons(self.state.parameters, self._policy)
        self.state = self._init_state(self.state.step, arrays)

    def step(self, batches: list[Batch], progress: Progress) -> dict[str, jax.Array]:
        """Runs one optimizer step and returns its metrics, which may still be computing."""
        number = lambda value: jnp.asarray(value, self.wide)  # noqa: E731
        schedule = ScheduleValues(
            target=number(progress.target),
            neuron_scale=None if progress.neuron_scale is None else number(progress.neuron_scale),
            learning_rate=number(progress.learning_rate),
            adapter_learning_rate=number(progress.adapter_learning_rate),
            key=self._key,
            supervised=number(eviction_target(self._recipe.compression_ratio))
            if progress.stage.kind == "supervise"
            else None,
        )
        place = None
        if self._mesh is not None:
            place = NamedSharding(self._mesh, PartitionSpec(None, sharding.DATA))
        stacked = {
            key: jax.device_put(np.stack([batch[key] for batch in batches]), place)
            for key in batches[0]
        }
        self.state, metrics = self._step(self.state, self._constants, Passes(**stacked), schedule)
        return metrics

    def utilisation(self, tokens_per_second: float, keys: float) -> float | None:
        """Returns the model FLOPs utilisation; None if the devices' peak is unknown.

        Args:
          tokens_per_second: tokens of documents per second, without padding.
          keys: mean number of keys that a token sees.
        """
        if self._peak is None:
            return None
        operations = token_operations(
            self._model.config,
            self._layer_parameters,
            keys,
            frozen=self._frozen_layers,
            teacher=self._has_teacher,
        )
        return operations * tokens_per_second / self._peak

    def model(self) -> LanguageModel:
        """Returns the current student, in the dtypes of the original model."""
        trained = {
            name: jnp.array(x, self._dtypes[name], copy=True)
            for name, x in self.state.parameters.items()
        }
        arrays = self._frozen | trained
        if self._mesh is not None:
            places = shardings(self._transformer, self._mesh, sharding.DECODING_RULES)
            arrays = {name: jax.device_put(x, places[name]) for name, x in arrays.items()}
        return dataclasses.replace(
            self._model, transformer=self._rebuild(arrays), policy=self._policy, mesh=self._mesh
        )
