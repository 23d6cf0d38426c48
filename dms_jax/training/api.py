"""`train`: one loop for every kind of training; `retrofit`: that loop for a smaller cache.

    train(model, recipe)              from scratch, further on the same tokens, after a conversion
    retrofit(model, policy, recipe)   adapter or neuron decay -> ramp of the compression ratio

Both end in a model and, where wanted, a directory.
"""

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import jax

from dms_jax import sharding
from dms_jax.checkpoint import save
from dms_jax.checks import Count, Positive, Whole, check
from dms_jax.data import batches as data_batches
from dms_jax.data.batches import Batch
from dms_jax.errors import ConfigError, DataError
from dms_jax.model.language_model import LanguageModel, check_model, use_mesh
from dms_jax.policies import Policy, Vanilla
from dms_jax.policies.base import check_policy
from dms_jax.training.loop import Evaluate, OnSnapshot, OnStep, Reports, Run
from dms_jax.training.recipe import Recipe
from dms_jax.training.run_directory import RunDirectory
from dms_jax.training.trainer import Trainer


def retrofit(
    model: LanguageModel,
    policy: Policy,
    *,
    recipe: Recipe,
    data: Any,
    out: str | os.PathLike | None = None,
    resume: bool = True,
    seed: int = 0,
    mesh: jax.sharding.Mesh | None = None,
    checkpoint_every: int = 100,
    stop_after: float | int | None = None,
    on_step: OnStep | None = None,
    on_snapshot: OnSnapshot | None = None,
    evaluate: Evaluate | None = None,
    evaluate_every: int = 1000,
    progress: bool = True,
) -> LanguageModel:
    """Trains a model to run with a policy, by distillation from itself.

    Args:
      model: the original, which is also the teacher; it is not changed.
      policy: with a trainable form, e.g. `DMS(window=256, source="adapter")`. An adapter is added
        where the policy reads one and the model has none.
      recipe: stages with a ramp among them, sizes and rates (`dms_jax.recipes`).
      data, out, resume, seed, mesh, checkpoint_every, stop_after, on_step, on_snapshot, evaluate,
        evaluate_every, progress: as for `train`.

    Returns:
      The retrofitted model, whose `policy` is the given one.

    Raises:
      ConfigError: the policy has nothing to learn, the recipe no ramp; and what `train` raises.
    """
    if not isinstance(policy, Policy) or not policy.retrofit.possible:
        name = policy.name if isinstance(policy, Policy) else repr(policy)
        raise ConfigError(f"{name} has nothing to learn; retrofit for DMS(...) or DMC(...)")
    if isinstance(recipe, Recipe) and recipe.compression_ratio == 1:
        raise ConfigError(
            f"the recipe {recipe.name} has no ramp to a compression ratio; add Stage('ramp', ...)"
        )
    return train(
        model,
        policy=policy,
        recipe=recipe,
        data=data,
        out=out,
        resume=resume,
        seed=seed,
        mesh=mesh,
        checkpoint_every=checkpoint_every,
        stop_after=stop_after,
        on_step=on_step,
        on_snapshot=on_snapshot,
        evaluate=evaluate,
        evaluate_every=evaluate_every,
        progress=progress,
    )


def train(
    model: LanguageModel,
    *,
    recipe: Recipe,
    data: Any,
    policy: Policy | None = None,
    out: str | os.PathLike | None = None,
    resume: bool = True,
    seed: int = 0,
    mesh: jax.sharding.Mesh | None = None,
    checkpoint_every: int = 100,
    stop_after: float | int | None = None,
    on_step: OnStep | None = None,
    on_snapshot: OnSnapshot | None = None,
    evaluate: Evaluate | None = None,
    evaluate_every: int = 1000,
    progress: bool = True,
) -> LanguageModel:
    """Trains a model: from scratch, further, or under the decisions of a policy.

    Args:
      model: from `dms_jax.initialize` or `dms_jax.load`; it is not changed.
      recipe: stages, sizes and rates (`dms_jax.recipes`). Without a policy it must be on the
        language modelling loss, and neuron decay and ramps are steps like others. The control
        of a retrofit, the same tokens without eviction, has `recipe.control(its_policy)`.
      data: texts, conversations, token ids, paths or a source (`dms_jax.data.as_source`), or an
        iterator over batches, resumable if it has `get_state` and `set_state`.
      policy: whose decisions are in force; None for the plain cache.
      out: directory of the run: checkpoints, log, snapshots and the resulting model.
      resume: continue the run that `out` holds. It goes on bit for bit as if never interrupted.
      seed: of the order of the data and of the noise.
      mesh: devices to train on; None takes the surrounding mesh, or the model's.
      checkpoint_every: steps between checkpoints.
      stop_after: seconds after which the run ends like on Ctrl-C, to be resumed; None for never.
      on_step: called with the record of every step (what the log holds).
      on_snapshot: called with (compression ratio, model) at the recipe's snapshots.
      evaluate: measures a model on the way; the numbers go into the step's record.
      evaluate_every: steps between evaluations; there is one at the end too.
      progress: whether to show a progress bar.

    Returns:
      The trained model, whose `policy` is the given one.

    Raises:
      ConfigError: model, policy, recipe, mesh and run directory do not go together.
      DataError: the data cannot be used.
      CheckpointError: `out` cannot be written, or what it holds cannot be resumed.
      TrainingDivergedError: the loss or the gradient stopped being finite.
      KeyboardInterrupt: on Ctrl-C or after `stop_after`, after a checkpoint was written.
    """
    policy = Vanilla() if policy is None else policy
    _check(model, policy, recipe)
    checkpoint_every = check("checkpoint_every", checkpoint_every, Count)
    evaluate_every = check("evaluate_every", evaluate_every, Count)
    seed, stop_after = check("seed", seed, Whole), check("stop_after", stop_after, Positive | None)
    if mesh is None:
        context = jax.sharding.get_mesh()
        mesh = model.mesh if context.empty else context
    pass_size = recipe.pass_size(1 if mesh is None else mesh.shape[sharding.DATA])
    directory = None
    if out is not None:
        settings = {
            "model": dataclasses.asdict(model.config),
            "recipe": {**dataclasses.asdict(recipe), "name": None, "snapshots": None},
            "policy": policy.to_dict(),
            "seed": seed,
        }
        directory = RunDirectory(out, settings=settings, resume=resume)
    try:
        with use_mesh(mesh):
            source = _batches(model, recipe, data, pass_size, seed)
            trainer = Trainer(model, policy, recipe, seed, mesh)
            if directory is not None and directory.latest_step is not None:
                trainer.state, place = directory.restore(trainer.abstract_state)
                _go_to(source, place)
            reports = Reports(on_step, on_snapshot, evaluate, evaluate_every, show=progress)
            ignored = _ignored_tokens(model, recipe)
            run = Run(trainer, policy, recipe, source, pass_size, ignored, directory, reports)
            run.go(checkpoint_every=checkpoint_every, stop_after=stop_after)
            result = trainer.model()
            if directory is not None:
                save(result, policy, directory.path / "model")
            return result
    finally:
        if directory is not None:
            directory.close()


def _check(model: LanguageModel, policy: Policy, recipe: Recipe) -> None:
    """Raises ConfigError for what can be known to fail before anything is done."""
    check_model(model)
    check_policy(policy)
    check("recipe", recipe, Recipe)
    if not policy.retrofit.possible and policy != Vanilla():
        raise ConfigError(
            f"{policy.name} has no trainable form: train with the plain cache (policy=None) and "
            f"run the result with {policy.name}"
        )
    if not policy.retrofit.possible and recipe.loss == "distillation":
        raise ConfigError(
            "with the plain cache the model is its own teacher, and distillation has nothing to "
            "teach; set loss='language_modeling' in the recipe"
        )
    config = model.config
    if model.policy.retrofit.borrowed_neurons is not None:
        raise ConfigError(
            f"this model was retrofitted for {model.policy}: neurons of its attention carry "
            "decisions, so it cannot be the teacher; start from the original checkpoint"
        )
    if recipe.trainable == "adapter" and not policy.retrofit.adapter:
        raise ConfigError(
            f"the recipe trains the adapter alone and {policy} has none; use "
            "DMS(source='adapter') or trainable='all'"
        )
    if recipe.sequence_length > config.max_position_embeddings:
        raise ConfigError(
            f"sequences of {recipe.sequence_length} tokens do not fit the model's "
            f"{config.max_position_embeddings} positions; set sequence_length in the recipe"
        )


def _batches(
    model: LanguageModel, recipe: Recipe, data: Any, pass_size: int, seed: int
) -> Iterator[Batch]:
    if hasattr(data, "__next__"):
        return data
    return data_batches(
        data,
        model.tokenizer,
        batch_size=pass_size,
        length=recipe.sequence_length,
        packing=recipe.packing,
        vocab_size=model.config.vocab_size,
        seed=seed,
    )


def _ignored_tokens(model: LanguageModel, recipe: Recipe) -> tuple[int, ...]:
    """Token ids that do not count in the loss."""
    if not recipe.ignore_end_token:
        return ()
    ends = set(model.generation.eos_token_ids)
    if model.tokenizer is not None and model.tokenizer.eos_token_id is not None:
        ends.add(model.tokenizer.eos_token_id)
    return tuple(sorted(ends))


def _go_to(source: Any, place: Any) -> None:
    if not hasattr(source, "set_state"):
        raise DataError("the data cannot be resumed: its iterator has no set_state")
    source.set_state(place)
