"""The options of a training run, which `train` and `retrofit` take as keyword arguments."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypedDict

from jax.sharding import Mesh

from dms_jax.checks import Count, Options, Positive, Whole
from dms_jax.model.language_model import LanguageModel

OnStep = Callable[[dict[str, Any]], None]
OnSnapshot = Callable[[float, LanguageModel], None]
Evaluate = Callable[[LanguageModel], Mapping[str, float]]


class RunKeywords(TypedDict, total=False):
    """The options of a run by name, for type checkers; see `RunOptions`."""

    resume: bool
    restart_from: Whole | None
    seed: Whole
    mesh: Mesh | None
    checkpoint_every: Count
    checkpoint_minutes: Positive | None
    keep_checkpoints: Count
    stop_after: Positive | None
    on_step: OnStep | None
    on_snapshot: OnSnapshot | None
    evaluate: Evaluate | None
    evaluate_every: Count
    progress: bool
    adapter_only: bool
    most_skipped: Whole


@dataclasses.dataclass(frozen=True)
class RunOptions(Options):
    """How a training run is seeded, placed, saved, measured and shown.

    Attributes:
      resume: whether to continue the run in the output directory, bit for bit as if it had never
        been interrupted. Model, frozen weights, recipe, policy, seed and data must be the same.
      restart_from: step of the checkpoint from which to continue with another recipe, such as lower
        rates after a divergence; later checkpoints are deleted, and the log is cut. 0 starts again.
        If given again after a stop, the run continues from the newest checkpoint since the restart.
      seed: seed of the order of the data and of the noise.
      mesh: devices to train on; None takes the mesh of the context, or else the model's.
      checkpoint_every: steps between checkpoints. One is also written at the end, on Ctrl-C, and on
        SIGTERM or another notice of preemption.
      checkpoint_minutes: the most minutes between checkpoints; None for no limit.
      keep_checkpoints: number of newest checkpoints to keep.
      stop_after: seconds after which the run stops as on Ctrl-C; None for never.
      on_step: called with the record of every step, as in the log.
      on_snapshot: called with (compression ratio, model) at the recipe's snapshots.
      evaluate: measures the model during training; its numbers go into the record of the step. The
        model is sharded as for training; `model.place()` places it for decoding.
      evaluate_every: steps between evaluations; another one runs at the end.
      progress: whether to show a progress bar.
      adapter_only: whether the saved model and snapshots hold only the parameters trained beside
        frozen weights (`save(..., adapter_only=True)`), for `load(base, adapter=...)`.
      most_skipped: the most steps in a row that may be skipped because their loss or gradient is
        not finite; one more raises TrainingDivergedError.
    """

    resume: bool = True
    restart_from: Whole | None = None
    seed: Whole = 0
    mesh: Mesh | None = None
    checkpoint_every: Count = 100
    checkpoint_minutes: Positive | None = 15.0
    keep_checkpoints: Count = 2
    stop_after: Positive | None = None
    on_step: OnStep | None = None
    on_snapshot: OnSnapshot | None = None
    evaluate: Evaluate | None = None
    evaluate_every: Count = 1000
    progress: bool = True
    adapter_only: bool = False
    most_skipped: Whole = 3
