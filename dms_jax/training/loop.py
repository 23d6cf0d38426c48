"""The training loop: batches, steps, logs, checkpoints, and a clean stop.

A few steps are in flight: the metrics of a step are read while later ones run, so that the device
never waits for the host. Ctrl-C and SIGTERM end the run after the current step, with a checkpoint
to resume from. Before each step, several processes agree whether it is the last and whether to
write a checkpoint after it; an error in one of them ends all.
"""

import collections
import concurrent.futures
import dataclasses
import math
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from dms_jax import processes
from dms_jax.checkpoint import save
from dms_jax.data.batches import Batch, ProcessBatches, RowAssignment, check_batch
from dms_jax.errors import DataError, TrainingDivergedError
from dms_jax.model.language_model import LanguageModel
from dms_jax.policies import Policy
from dms_jax.training.display import Display, aim, opening_line
from dms_jax.training.interrupts import Interrupts
from dms_jax.training.options import RunOptions
from dms_jax.training.recipe import Progress, Recipe
from dms_jax.training.run_directory import RunDirectory
from dms_jax.training.trainer import Trainer

_IN_FLIGHT = 2  # steps dispatched before the metrics of the oldest are read


@dataclasses.dataclass(frozen=True)
class _Pending:
    """A step in flight.

    Attributes:
      step: number of the step, from 1.
      progress: settings of the step.
      tokens: number of its tokens, padding included.
      data_seconds: time that the host waited for its batches.
      metrics: its metrics, still on the device.
      ended: the time at which the device finishes it.
    """

    step: int
    progress: Progress
    tokens: int
    data_seconds: float
    metrics: dict[str, jax.Array]
    ended: concurrent.futures.Future[float]


class Loop:
    """The steps of a training run, from the trainer's current step to the end."""

    def __init__(
        self,
        trainer: Trainer,
        model: LanguageModel,
        policy: Policy,
        recipe: Recipe,
        source: Iterator[Batch] | ProcessBatches,
        assignment: RowAssignment,
        directory: RunDirectory | None,
        options: RunOptions,
    ):
        self._trainer, self._policy, self._recipe = trainer, policy, recipe
        self._source, self._assignment, self._directory = source, assignment, directory
        self._vocab_size, self._options = model.config.vocab_size, options
        self._ignored = np.asarray(_ignored_tokens(model, recipe), np.int32)
        self._pending: collections.deque[_Pending] = collections.deque()
        self._total = recipe.total_steps(policy)
        self._skipped = self._skipped_in_a_row = 0
        self._clock = self._saved = time.perf_counter()
        self._end = math.inf
        self._display: Any = None
        self._watcher = concurrent.futures.ThreadPoolExecutor(1, "steps")

    def run(self) -> None:
        """Runs the remaining steps.

        Raises:
          KeyboardInterrupt: on Ctrl-C or after `stop_after` seconds.
        """
        options = self._options
        total = self._total
        start = int(self._trainer.state.step)
        if self._directory is not None:
            self._skipped = self._directory.skipped_steps(start)
        snapshots = self._snapshots(total)
        now = time.perf_counter()
        self._end, self._saved = now + (options.stop_after or math.inf), now
        self._display = Display(
            opening=opening_line(self._recipe, self._policy, self._trainer.state.parameters, start),
            total=total,
            done=start,
            main=self._recipe.loss.replace("_", " "),
            target=aim(self._recipe, self._policy),
            enabled=options.progress and processes.is_first(),
        )
        agree = processes.Agreement()
        with self._display, self._watcher, Interrupts(self._say_stopping) as interrupts:
            try:
                for step in range(start, total):
                    self._take(step, interrupts, agree, snapshots)
                self._read()
            except BaseException as error:
                agree.fail(error)
                raise

    def _say_stopping(self) -> None:
        """Says at once after Ctrl-C that up to three steps still run."""
        last = "" if self._directory is None else ", then a checkpoint is written"
        self._display.say(
            f"Stopping: steps that have begun end first, {_IN_FLIGHT + 1} at most{last}. Ctrl-C "
            "again ends at once."
        )

    def _take(
        self,
        step: int,
        interrupts: Interrupts,
        agree: processes.Agreement,
        snapshots: dict[int, list[float]],
    ) -> None:
        """Runs a step; then evaluates, saves and stops if due."""
        options, total, done = self._options, self._total, step + 1
        batches = self._draw(step)
        stop, save_now = agree(*self._wishes(step, interrupts))
        self._step(step, batches)
        self._read(leave=_IN_FLIGHT)
        if options.evaluate and (done % options.evaluate_every == 0 or done == total):
            self._read(evaluate=True)
        for ratio in snapshots.get(done, ()):
            self._snapshot(ratio)
        if save_now or done % options.checkpoint_every == 0 or done == total:
            self._checkpoint(done)
        if not processes.several():  # alone: a request to stop during the step counts too
            stop, _ = self._wishes(done, interrupts)
        if stop and done < total:
            self._checkpoint(done)
            if self._directory is not None:
                self._directory.finish()
            raise KeyboardInterrupt(f"stopped after step {done}")

    def _wishes(self, step: int, interrupts: Interrupts) -> tuple[bool, bool]:
        """Returns whether this process wants to stop, and whether it wants a checkpoint.

        The first process's clock counts.
        """
        now, stop = time.perf_counter(), interrupts.requested
        if processes.several() and self._directory is not None:
            stop = stop or self._directory.reached_preemption(step)
        if not processes.is_first():
            return stop, False
        minutes = self._options.checkpoint_minutes
        return stop or now > self._end, minutes is not None and now > self._saved + 60 * minutes

    def _draw(self, step: int) -> tuple[list[Batch], float]:
        """Returns the batches of a step, and the seconds that the host waited for them."""
        size = self._recipe.batch_of(self._recipe.progress(step, self._policy).stage)
        began = time.perf_counter()
        drawn = [self._next_batch(step) for _ in range(size // self._assignment.pass_size)]
        if any(batch.keys() != drawn[0].keys() for batch in drawn):
            raise DataError(
                f"Some batches of step {step + 1} have segment_ids and others have none; give them "
                "to all batches or to none."
            )
        return drawn, time.perf_counter() - began

    def _step(self, step: int, batches: tuple[list[Batch], float]) -> None:
        recipe, policy = self._recipe, self._policy
        progress = recipe.progress(step, policy)
        if policy.retrofit.borrowed_neurons is not None and progress.neuron_scale is None:
            before = recipe.progress(step - 1, policy) if step else None
            if before is None or before.neuron_scale is not None:
                self._trainer.zero_borrowed_neurons()
        drawn, waited = batches
        metrics = self._trainer.step(drawn, progress)
        tokens = len(drawn) * self._assignment.pass_size * recipe.sequence_length
        ended = self._watcher.submit(_when_ready, metrics)
        self._pending.append(_Pending(step + 1, progress, tokens, waited, metrics, ended))

    def _next_batch(self, step: int) -> Batch:
        """Returns this process's rows of the next pass."""
        if isinstance(self._source, ProcessBatches):
            batch = next(self._source)
            counts = batch["loss_mask"] & ~np.isin(batch["tokens"], self._ignored)
            return batch | {"loss_mask": counts}
        try:
            given = next(self._source)
        except StopIteration as error:
            raise DataError(
                f"The data ended before step {step + 1}. Give more data or a recipe of fewer steps."
            ) from error
        shape = (self._assignment.pass_size, self._recipe.sequence_length)
        whole = check_batch(given, vocab_size=self._vocab_size, shape=shape)
        whole["loss_mask"] = whole["loss_mask"] & ~np.isin(whole["tokens"], self._ignored)
        return {name: array[list(self._assignment.rows)] for name, array in whole.items()}

    def _read(self, *, leave: int = 0, evaluate: bool = False) -> None:
        """Reads, checks and reports steps in flight until `leave` are left.

        With `evaluate`, evaluates the model and adds the results to the record of the last step.
        """
        while len(self._pending) > leave:
            pending = self._pending.popleft()
            record = self._record(pending)
            if evaluate and not self._pending and self._options.evaluate is not None:
                numbers = self._options.evaluate(self._trainer.model())
                record["evaluation"] = {name: float(value) for name, value in numbers.items()}
                self._clock = time.perf_counter()
            self._display.update(record)
            if self._directory is not None:
                self._directory.log(record)
            if self._options.on_step is not None:
                self._options.on_step(record)

    def _record(self, pending: _Pending) -> dict[str, Any]:
        values = {name: float(value) for name, value in jax.device_get(pending.metrics).items()}
        # Several steps may be read at once: a thread has recorded when each ended.
        ended = pending.ended.result()
        seconds, self._clock = ended - self._clock, ended
        skipped = bool(values.pop("skipped"))
        self._skipped += skipped
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        most = self._options.most_skipped
        at_end = pending.step == self._total and self._skipped_in_a_row >= min(self._total, most)
        if self._skipped_in_a_row > most or (skipped and at_end):
            raise TrainingDivergedError(self._diverged(pending.step, values))
        progress, tokens = pending.progress, pending.tokens
        return {
            "step": pending.step,
            "stage": progress.stage.kind,
            **values,
            "skipped": skipped,
            "skipped_steps": self._skipped,
            "compression_ratio": 1 / max(1 - values["evicted"], 1e-6),
            "target": progress.target,
            "target_ratio": progress.compression_ratio,
            "learning_rate": progress.learning_rate,
            "adapter_learning_rate": progress.adapter_learning_rate,
            "tokens": tokens,
            "seconds": seconds,
            "data_seconds": pending.data_seconds,
            "tokens_per_second": tokens / seconds,
            "model_flops_utilisation": self._trainer.utilisation(
                tokens * values["document_share"] / seconds,
                values["visible_keys"],
                progress.stage.kind,
            ),
        }

    def _diverged(self, step: int, values: dict[str, float]) -> str:
        """Deletes the checkpoints that no finite step followed; returns the error message."""
        parts = ", ".join(f"{name} {value:g}" for name, value in sorted(values.items()))
        before = self._skipped_in_a_row - 1
        skipped = f" The {before} before it were skipped for the same reason." if before else ""
        back = ""
        if self._directory is not None:
            self._directory.discard(step - self._skipped_in_a_row)
            latest = self._directory.latest_step or 0
            back = (
                f" The last checkpoint is of step {latest}" if latest else " There is no checkpoint"
            )
            back += f": `restart_from={latest}` goes on from there with other rates."
        return f"Step {step} is not finite: {parts}.{skipped} Lower the learning rates.{back}"

    def _checkpoint(self, done: int) -> None:
        if self._directory is None:
            return
        self._read()
        # Never save parameters unless a later step with them was finite.
        if self._skipped_in_a_row and done < self._total:
            return
        get_state = getattr(self._source, "get_state", lambda: None)
        self._directory.save(done, self._trainer.state, get_state())
        self._clock = self._saved = time.perf_counter()

    def _snapshots(self, total: int) -> dict[int, list[float]]:
        """Returns number of steps -> snapshot ratios of the recipe reached after them."""
        reached: dict[int, list[float]] = {}
        for ratio in sorted(self._recipe.snapshots):
            for done in range(1, total + 1):
                if self._recipe.progress(done, self._policy).compression_ratio >= ratio - 1e-9:
                    reached.setdefault(done, []).append(float(ratio))
                    break
        return reached

    def _snapshot(self, ratio: float) -> None:
        """Saves the model at a ratio, before the checkpoint of this step."""
        self._read()
        model = self._trainer.model()
        if self._directory is not None:
            path = self._directory.path / "snapshots" / f"{ratio:g}"
            save(model, self._policy, path, adapter_only=self._options.adapter_only)
        if self._options.on_snapshot is not None:
            self._options.on_snapshot(ratio, model)
        self._clock = time.perf_counter()


def _when_ready(metrics: dict[str, jax.Array]) -> float:
    """Waits for a step and returns the time at which the device finished it."""
    jax.block_until_ready(metrics)
    return time.perf_counter()


def _ignored_tokens(model: LanguageModel, recipe: Recipe) -> tuple[int, ...]:
    """Returns the token ids excluded from the loss."""
    if not recipe.ignore_end_token:
        return ()
    ends = set(model.generation.eos_token_ids)
    if model.tokenizer is not None and model.tokenizer.eos_token_id is not None:
        ends.add(model.tokenizer.eos_token_id)
    return tuple(sorted(ends))
