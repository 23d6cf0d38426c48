"""`retrofit`: a pretrained model learns to run with a small cache.

    adapter or neuron decay  ->  ramp of the compression ratio  ->  the model, and a directory

The loop keeps one step in flight: the metrics of a step are read while the next one runs. Ctrl-C
ends the run after the current step, with a checkpoint to resume from.
"""

import dataclasses
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from dms_jax import sharding
from dms_jax.checkpoint import save
from dms_jax.data import batches as data_batches
from dms_jax.data.batches import Batch
from dms_jax.errors import ConfigError, DataError, TrainingDivergedError
from dms_jax.model.language_model import LanguageModel, use_mesh
from dms_jax.policies import Policy
from dms_jax.training.display import Display
from dms_jax.training.recipes import Progress, Recipe
from dms_jax.training.run_directory import RunDirectory
from dms_jax.training.trainer import Trainer

OnStep = Callable[[dict[str, Any]], None]
OnSnapshot = Callable[[float, LanguageModel], None]


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
    on_step: OnStep | None = None,
    on_snapshot: OnSnapshot | None = None,
    progress: bool = True,
) -> LanguageModel:
    """Trains a model to run with a policy, by distillation from itself.

    Args:
      model: the original, which is also the teacher; it is not changed.
      policy: with a trainable form, e.g. `DMS(window=256, source="adapter")`. An adapter is added
        where the policy reads one and the model has none.
      recipe: stages, sizes and rates (`dms_jax.recipes`).
      data: texts, conversations, token ids, paths or a source (`dms_jax.data.as_source`), or an
        iterator over batches, resumable if it has `get_state` and `set_state`.
      out: directory of the run: checkpoints, log, snapshots and the resulting model.
      resume: continue the run that `out` holds. It goes on bit for bit as if never interrupted.
      seed: of the order of the data and of the noise.
      mesh: devices to train on; None takes the surrounding mesh, or the model's.
      checkpoint_every: steps between checkpoints.
      on_step: called with the record of every step (what the log holds).
      on_snapshot: called with (compression ratio, model) at the recipe's snapshots.
      progress: whether to show a progress bar.

    Returns:
      The retrofitted model, whose `policy` is the given one.

    Raises:
      ConfigError: model, policy, recipe, mesh and run directory do not go together.
      DataError: the data cannot be used.
      CheckpointError: `out` cannot be written, or what it holds cannot be resumed.
      TrainingDivergedError: the loss or the gradient stopped being finite.
      KeyboardInterrupt: on Ctrl-C, after a checkpoint was written.
    """
    _check(model, policy, recipe, checkpoint_every, seed)
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
            run = _Run(trainer, policy, recipe, source, pass_size, directory)
            run.on_step, run.on_snapshot = on_step, on_snapshot
            run.checkpoint_every = checkpoint_every
            run.go(show=progress)
            result = trainer.model()
            if directory is not None:
                save(result, policy, directory.path / "model")
            return result
    finally:
        if directory is not None:
            directory.close()


def _check(
    model: LanguageModel, policy: Policy, recipe: Recipe, checkpoint_every: int, seed: int
) -> None:
    """Raises ConfigError for what can be known to fail before anything is done."""
    if not isinstance(model, LanguageModel):
        raise ConfigError(f"the model must come from dms_jax.load, got {model!r:.80}")
    if not isinstance(policy, Policy) or not policy.trainable:
        name = policy.name if isinstance(policy, Policy) else repr(policy)
        raise ConfigError(f"{name} has nothing to learn; retrofit for DMS(...)")
    if not isinstance(recipe, Recipe):
        raise ConfigError(f"recipe must be a Recipe of dms_jax.recipes, got {recipe!r}")
    for name, value, least in (("checkpoint_every", checkpoint_every, 1), ("seed", seed, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"{name} must be a whole number >= {least}, got {value!r}")
    config = model.config
    policy.validate(
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )
    if model.policy.borrowed_neurons is not None:
        raise ConfigError(
            f"this model was retrofitted for {model.policy}: neurons of its attention carry "
            "decisions, so it cannot be the teacher; start from the original checkpoint"
        )
    if recipe.trainable == "adapter" and not policy.uses_adapter:
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
    ignored = ()
    if recipe.ignore_end_token:
        ends = set(model.generation.eos_token_ids)
        if model.tokenizer is not None and model.tokenizer.eos_token_id is not None:
            ends.add(model.tokenizer.eos_token_id)
        ignored = tuple(sorted(ends))
    return data_batches(
        data,
        model.tokenizer,
        batch_size=pass_size,
        length=recipe.sequence_length,
        packing=recipe.packing,
        ignored_tokens=ignored,
        vocab_size=model.config.vocab_size,
        seed=seed,
    )


def _go_to(source: Any, place: Any) -> None:
    if not hasattr(source, "set_state"):
        raise DataError("the data cannot be resumed: its iterator has no set_state")
    source.set_state(place)


class _Run:
    """The steps of a retrofit, from where the trainer stands to the end."""

    on_step: OnStep | None = None
    on_snapshot: OnSnapshot | None = None
    checkpoint_every: int = 100

    def __init__(
        self,
        trainer: Trainer,
        policy: Policy,
        recipe: Recipe,
        source: Iterator[Batch],
        pass_size: int,
        directory: RunDirectory | None,
    ):
        self._trainer, self._policy, self._recipe = trainer, policy, recipe
        self._source, self._pass_size, self._directory = source, pass_size, directory
        self._pending: tuple[int, Progress, int, dict[str, jax.Array]] | None = None
        self._clock = time.perf_counter()
        self._display: Any = None

    def go(self, *, show: bool) -> None:
        total = self._recipe.total_steps(self._policy)
        start = int(self._trainer.state.step)
        snapshots = self._snapshots(total)
        main = self._recipe.loss.replace("_", " ")
        with (
            Display(total=total, done=start, main=main, enabled=show) as self._display,
            _Interrupts() as interrupts,
        ):
            for step in range(start, total):
                self._one(step)
                done = step + 1
                if done in snapshots:
                    self._finish_pending()
                    for ratio in snapshots[done]:
                        self._snapshot(ratio)
                if done % self.checkpoint_every == 0 or done == total:
                    self._checkpoint(done)
                if interrupts.requested and done < total:
                    self._checkpoint(done)
                    raise KeyboardInterrupt(f"stopped after step {done}")
            self._finish_pending()

    def _one(self, step: int) -> None:
        recipe, policy = self._recipe, self._policy
        progress = recipe.progress(step, policy)
        if policy.borrowed_neurons is not None and progress.neuron_scale is None:
            before = recipe.progress(step - 1, policy) if step else None
            if before is None or before.neuron_scale is not None:
                self._trainer.zero_borrowed_neurons()
        size = progress.stage.batch_size or recipe.batch_size
        drawn = [self._draw(step) for _ in range(size // self._pass_size)]
        metrics = self._trainer.step(drawn, progress)
        self._finish_pending()
        self._pending = (step + 1, progress, size * recipe.sequence_length, metrics)

    def _draw(self, step: int) -> Batch:
        try:
            batch = dict(next(self._source))
        except StopIteration as error:
            raise DataError(f"the data ended before step {step + 1}") from error
        known = {"tokens", "loss_mask", "segment_ids"}
        if "tokens" not in batch or batch.keys() - known:
            raise DataError(
                "a batch is a dict of tokens and, where wanted, loss_mask and segment_ids; got "
                f"{', '.join(sorted(map(str, batch))) or 'nothing'}"
            )
        tokens = np.asarray(batch["tokens"], np.int32)
        expected = (self._pass_size, self._recipe.sequence_length)
        if tokens.shape != expected:
            raise DataError(f"a batch must hold tokens {expected}, got {tokens.shape}")
        mask = batch.get("loss_mask")
        batch["loss_mask"] = np.ones(tokens.shape, bool) if mask is None else np.asarray(mask, bool)
        return batch | {"tokens": tokens}

    def _finish_pending(self) -> None:
        """Reads the metrics of the step in flight, checks and reports them."""
        if self._pending is None:
            return
        step, progress, tokens, metrics = self._pending
        self._pending = None
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        if not (math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])):
            raise TrainingDivergedError(self._diverged(step, values))
        stage = progress.stage
        adapter_rate = stage.adapter_learning_rate
        record = {
            "step": step,
            "stage": stage.kind,
            **values,
            "compression_ratio": 1 / max(1 - values["evicted"], 1e-6),
            "target": progress.target,
            "target_ratio": progress.compression_ratio,
            "learning_rate": stage.learning_rate,
            "adapter_learning_rate": stage.learning_rate if adapter_rate is None else adapter_rate,
            "tokens": tokens,
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
        }
        self._display.update(record)
        if self._directory is not None:
            self._directory.log(record)
        if self.on_step is not None:
            self.on_step(record)

    def _diverged(self, step: int, values: dict[str, float]) -> str:
        parts = ", ".join(f"{name} {value:g}" for name, value in sorted(values.items()))
        latest = None if self._directory is None else self._directory.latest_step
        back = "" if latest is None else f" The last checkpoint is of step {latest}."
        return f"step {step} is not finite: {parts}. Lower the learning rates.{back}"

    def _checkpoint(self, done: int) -> None:
        if self._directory is None:
            return
        self._finish_pending()
        get_state = getattr(self._source, "get_state", lambda: None)
        self._directory.save(done, self._trainer.state, get_state())

    def _snapshots(self, total: int) -> dict[int, list[float]]:
        """After how many steps which of the recipe's ratios is reached."""
        reached: dict[int, list[float]] = {}
        for ratio in sorted(self._recipe.snapshots):
            for done in range(1, total + 1):
                if self._recipe.progress(done, self._policy).compression_ratio >= ratio - 1e-9:
                    reached.setdefault(done, []).append(float(ratio))
                    break
        return reached

    def _snapshot(self, ratio: float) -> None:
        model = self._trainer.model()
        if self._directory is not None:
            save(model, self._policy, self._directory.path / "snapshots" / f"{ratio:g}")
        if self.on_snapshot is not None:
            self.on_snapshot(ratio, model)
        self._clock = time.perf_counter()


class _Interrupts:
    """Turns the first Ctrl-C into a request, so that a step and its bookkeeping are whole.

    A second one interrupts at once. Signals reach only the main thread; elsewhere nothing changes.
    """

    def __init__(self):
        self.requested = False
        self._previous: Any = None

    def __enter__(self) -> "_Interrupts":
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def _on_signal(self, *_: Any) -> None:
        self.requested = True
        signal.signal(signal.SIGINT, self._previous)

    def __exit__(self, *_: Any) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
