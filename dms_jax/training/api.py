"""`train`: one loop for every kind of training; `retrofit`: that loop for a smaller cache.

    train(model, recipe)              from scratch, continued, or after a conversion
    retrofit(model, policy, recipe)   adapter or neuron decay -> ramp of the compression ratio

Both return a model and can save it.
"""

import dataclasses
import json
import os
import warnings
from typing import Any, Unpack

import jax
import jax.numpy as jnp

from dms_jax import compilation, processes, sharding
from dms_jax.checkpoint import save
from dms_jax.checks import check, show_options
from dms_jax.data import as_source
from dms_jax.data.batches import RowAssignment, process_batches
from dms_jax.data.sources import fingerprint
from dms_jax.devices import fits_device, out_of_memory
from dms_jax.errors import ConfigError, DataError
from dms_jax.model.language_model import PACKAGE, LanguageModel, check_model, use_mesh
from dms_jax.model.layer_loop import check_layers
from dms_jax.model.low_rank import low_rank_of
from dms_jax.policies import Policy, Vanilla, as_policy
from dms_jax.training.loop import Loop
from dms_jax.training.options import RunKeywords, RunOptions
from dms_jax.training.parameters import Parameters, is_adapter, is_low_rank, parameters
from dms_jax.training.recipe import Recipe
from dms_jax.training.recipes import recommended
from dms_jax.training.remat import LESS_MEMORY
from dms_jax.training.run_directory import RunDirectory
from dms_jax.training.shards import check_split
from dms_jax.training.trainer import Trainer, rows_here

# Fields that may differ in a resumed run: they change steps only by the rounding of sums.
_FREE = ("name", "snapshots", "micro_batch_size", "remat", "unroll")


@show_options(RunOptions)
def retrofit(
    model: LanguageModel,
    policy: Policy | str,
    *,
    recipe: Recipe | None = None,
    data: Any = None,
    out: str | os.PathLike | None = None,
    **options: Unpack[RunKeywords],
) -> LanguageModel:
    """Trains a model to run with a policy, by distillation from itself.

    Args:
      model: the original, which is also the teacher; it is not changed. Its low-rank updates are
        trained further and are not part of the teacher, unless they are merged
        (`dms_jax.load(..., merge=True)`).
      policy: a policy with a trainable form, e.g. `DMS(window=256, source="adapter")`. An adapter
        is added if the policy reads one and the model has none.
      recipe: stages with a ramp or "supervise", sizes and learning rates (`dms_jax.recipes`); None
        for `dms_jax.recipes.recommended(policy, positions)`.
      data, out, **options: as for `train`.

    Returns:
      The retrofitted model, whose `policy` is the given one.

    Raises:
      ConfigError: the policy has nothing to learn, the recipe has no such stage, or `train` raises
        it.
    """
    policy = as_policy(policy)
    if not policy.retrofit.trainable:
        raise ConfigError(
            f"{policy.name} has nothing to learn; retrofit for DMS(...) or DMC(...), or for "
            "KVzap(...) or KVpop(...)."
        )
    check_model(model)
    if data is None:
        raise DataError(
            "retrofit learns from data=: texts, conversations, token ids, or paths of files "
            "(dms_jax.data.as_source), best answers of the model itself."
        )
    if recipe is None:
        recipe = recommended(policy, model.config.max_position_embeddings)
    if isinstance(recipe, Recipe) and recipe.compression_ratio == 1 and not recipe.supervises:
        raise ConfigError(
            f"The recipe {recipe.name} has no ramp to a compression ratio; add Stage('ramp', ...)."
        )
    return train(model, policy=policy, recipe=recipe, data=data, out=out, **options)


@show_options(RunOptions)
def train(
    model: LanguageModel,
    *,
    recipe: Recipe,
    data: Any,
    policy: Policy | str | None = None,
    out: str | os.PathLike | None = None,
    **options: Unpack[RunKeywords],
) -> LanguageModel:
    """Trains a model: from scratch, continued, or under the decisions of a policy.

    Args:
      model: from `dms_jax.initialize` or `dms_jax.load`; it is not changed.
      recipe: stages, sizes and learning rates (`dms_jax.recipes`). Without a policy it must use the
        language modelling loss, and neuron decay and ramps are ordinary steps. For the control of a
        retrofit (the same tokens without eviction) use `recipe.control(policy)`.
      data: texts, conversations, token ids, paths or a source (`dms_jax.data.as_source`), or an
        iterator over batches, resumable if it has `get_state` and `set_state`.
      policy: the policy whose decisions apply; None for vanilla.
      out: directory of the run: checkpoints, log, snapshots and the resulting model.
      **options: resume, restart_from, seed, mesh, checkpoint_every, checkpoint_minutes,
        keep_checkpoints, stop_after, on_step, on_snapshot, evaluate, evaluate_every, progress,
        adapter_only, most_skipped: see `dms_jax.training.RunOptions`.

    Returns:
      The trained model, whose `policy` is the given one. It is placed for decoding; if that does
      not fit the devices, it stays sharded as for training, with a warning.

    Raises:
      ConfigError: an option is malformed, or model, policy, recipe, mesh and run directory do not
        fit together.
      DataError: the data cannot be used.
      CheckpointError: `out` cannot be written, or its run cannot be resumed.
      OutOfMemoryError: a device has too little memory; the message says what needs less.
      TrainingDivergedError: too many steps in a row had a loss or gradient that is not finite.
      KeyboardInterrupt: on Ctrl-C, SIGTERM or after `stop_after`, once a checkpoint is written
        (none is written after a skipped step; the run then resumes from the previous checkpoint).
      OtherProcessError: another process of the run failed (`dms_jax.processes`).
    """
    compilation.prepare()
    policy = Vanilla() if policy is None else as_policy(policy)
    _check(model, policy, recipe)
    run = RunOptions(**options)
    if run.adapter_only:
        _check_adapter_only(model, policy, recipe)
    mesh = run.mesh
    if mesh is None:
        context = jax.sharding.get_mesh()
        mesh = model.mesh if context.empty else context
    processes.check_mesh(mesh)
    pass_size = recipe.pass_size(1 if mesh is None else mesh.shape[sharding.DATA])
    check_split(recipe, policy, mesh)
    rows = rows_here(mesh, pass_size)
    assignment = RowAssignment(recipe.batch_sizes, pass_size, rows)
    source, digest = data, None
    if not hasattr(data, "__next__"):
        data = as_source(data)
        digest = fingerprint(data)
        source = process_batches(
            data,
            model.tokenizer,
            assignment=assignment,
            length=recipe.sequence_length,
            packing=recipe.packing,
            vocab_size=model.config.vocab_size,
            seed=run.seed,
            answers_only=recipe.answers_only,
        )
    directory = None
    if out is not None:  # after all checks, so that a rejected run leaves no directory
        settings = {
            "model": dataclasses.asdict(model.config),
            "recipe": dataclasses.asdict(recipe) | dict.fromkeys(_FREE),
            "policy": policy.to_dict(),
            "seed": run.seed,
            "data": digest,
            "template": repr(sorted(getattr(model.tokenizer, "template_variables", {}).items())),
            "weights": _frozen_weights(model, policy, recipe),
        }
        directory = RunDirectory(
            out,
            settings=settings,
            resume=run.resume,
            restart_from=run.restart_from,
            keep=run.keep_checkpoints,
        )
    room = fits_device(
        f"The device ran out of memory in training. {LESS_MEMORY} dms_jax.plan (dms-jax plan) "
        "estimates beforehand what fits."
    )
    try:
        with use_mesh(mesh), room:
            trainer = Trainer(model, policy, recipe, run.seed, mesh)
            if directory is not None:
                _resume(trainer, source, directory)
                directory.remove_later()
            Loop(trainer, model, policy, recipe, source, assignment, directory, run).run()
            result = trainer.model()
            if directory is not None:
                path = directory.path / "model"
                save(result, policy, path, adapter_only=run.adapter_only)
                directory.wait()  # holds the moments until they are written
            del trainer  # frees the moments, before whole matrices are placed on the devices
            return _placed(result)
    finally:
        if directory is not None:
            directory.close()


def _frozen_weights(model: LanguageModel, policy: Policy, recipe: Recipe) -> str | None:
    """Returns sums of the bits of the weights that checkpoints lack; None if they lack none.

    Checkpoints hold neither frozen weights nor the teacher's, so a resumed run takes them from the
    given model, which must be the same.
    """
    if recipe.loss != "distillation" and recipe.trained_for(policy) == "all":
        return None
    arrays = {
        name: x
        for name, x in parameters(model.transformer).items()
        if not is_adapter(name) and not is_low_rank(name)
    }
    return json.dumps({name: int(each) for name, each in sorted(_sums(arrays).items())})


@jax.jit
def _sums(arrays: Parameters) -> Parameters:
    def total(x: jax.Array) -> jax.Array:
        bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
        return bits.sum(dtype=jnp.promote_types(bits.dtype, jnp.uint32))

    return {name: total(x) for name, x in arrays.items()}


def _placed(model: LanguageModel) -> LanguageModel:
    """Returns a trained model placed for decoding, or unchanged if that takes too much memory.

    Decoding splits no matrix over `data`, so a model trained over many devices may not fit. Several
    processes would have to agree on the fallback, so with them the error is raised.
    """
    try:
        result = model.place()
        jax.block_until_ready(parameters(result.transformer))
    except jax.errors.JaxRuntimeError as error:
        if not out_of_memory(error) or processes.several():
            raise
        warnings.warn(
            "The trained model does not fit the devices as it is placed for decoding; it is "
            "returned split over the devices as for training. What is saved is whole: load it over "
            "a mesh with more shards of `model` to generate.",
            skip_file_prefixes=(PACKAGE,),
        )
        return model
    return result


def _resume(trainer: Trainer, source: Any, directory: RunDirectory) -> None:
    """Continues from the newest checkpoint, if there is one."""
    if directory.latest_step is None:
        return
    if not hasattr(source, "set_state"):
        raise DataError("The data cannot be resumed: its iterator has no set_state.")
    trainer.state, position = directory.restore(trainer.abstract_state)
    source.set_state(position)


def _check(model: LanguageModel, policy: Policy, recipe: Recipe) -> None:
    """Raises ConfigError if model, policy and recipe do not fit together."""
    check_model(model)
    check("recipe", recipe, Recipe)
    if recipe.supervises and policy.retrofit.supervision is None:
        raise ConfigError(
            f"The recipe {recipe.name} teaches an adapter how much attention each token gets, and "
            f"{policy} reads none. Use KVzap(), KVpop() or DMS(source='adapter')."
        )
    if not policy.retrofit.possible and any(stage.kind != "supervise" for stage in recipe.stages):
        _check_untrainable(policy, recipe)
    config = model.config
    check_layers(config, policy)
    if config.logit_soft_cap is not None:
        raise ConfigError(
            f"The losses of training need logits without a cap, and those of a {config.model_type} "
            "have a soft cap. Train another model."
        )
    if recipe.supervises and (config.sinks or config.attention_soft_cap is not None):
        raise ConfigError(
            f"The recipe {recipe.name} learns from plain softmax attention, "
            f"and this {config.model_type} has sinks or a soft cap in it. Train by distillation."
        )
    if model.policy.retrofit.borrowed_neurons is not None:
        raise ConfigError(
            f"This model was retrofitted for {model.policy}: neurons of its attention carry "
            "decisions, so it cannot be the teacher. Start from the original checkpoint."
        )
    if recipe.trainable == "adapter" and not policy.retrofit.adapter:
        raise ConfigError(
            f"The recipe trains only the adapter, and {policy} has none. Use "
            "DMS(source='adapter') or `trainable='all'`."
        )
    if recipe.trainable == "low_rank":
        _check_low_rank(model, policy, recipe)
    if recipe.sequence_length > config.max_position_embeddings:
        raise ConfigError(
            f"Sequences of {recipe.sequence_length} tokens do not fit the model's "
            f"{config.max_position_embeddings} positions. Set sequence_length in the recipe."
        )


def _check_untrainable(policy: Policy, recipe: Recipe) -> None:
    """Raises ConfigError if a policy without a differentiable form cannot go through a recipe."""
    if policy.retrofit.supervision is not None:
        raise ConfigError(
            f"{policy.name} learns from attention alone, and the recipe {recipe.name} has other "
            "stages. Use recipes.kvpop(...)."
        )
    if policy != Vanilla():
        raise ConfigError(
            f"{policy.name} has no trainable form. Train with the vanilla cache (policy=None) and "
            f"run the result with {policy.name}."
        )
    if recipe.loss == "distillation":
        raise ConfigError(
            "With the vanilla cache the model is its own teacher, and distillation has nothing to "
            "teach. Set loss='language_modeling' in the recipe."
        )


def _check_low_rank(model: LanguageModel, policy: Policy, recipe: Recipe) -> None:
    """Raises ConfigError if low-rank updates cannot be trained."""
    if policy.retrofit.borrowed_neurons is not None:
        raise ConfigError(
            f"The recipe freezes the weights (low-rank updates), and {policy} needs "
            "neurons whose weights are set to zero first. Use DMS(source='adapter') or "
            "`trainable='all'`."
        )
    present = low_rank_of(model.transformer)
    if present not in (None, recipe.low_rank):
        raise ConfigError(
            f"The model has low-rank updates of rank {present.rank} and alpha {present.alpha:g}, "
            f"and the recipe trains {recipe.low_rank}. Set low_rank={present} in the recipe, or "
            "merge them into the weights first (dms_jax.load(..., merge=True))."
        )


def _check_adapter_only(model: LanguageModel, policy: Policy, recipe: Recipe) -> None:
    """Raises ConfigError if the result of a run cannot be saved without the base."""
    if recipe.trained_for(policy) == "all":
        raise ConfigError(
            "`adapter_only` writes an adapter without its base, and this recipe trains "
            "all weights. Set `trainable='adapter'` or `trainable='low_rank'` in the recipe."
        )
    if model.source is None:
        raise ConfigError(
            "adapter_only writes an adapter for a base on disk, and this model was not loaded from "
            "one. Save it first, and load that."
        )
