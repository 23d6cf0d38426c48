"""The published recipes as data, and one for a laptop.

A recipe is a list of stages and what stays the same over them. Change one with
`dataclasses.replace(recipe, batch_size=16)`. The window, the source of decisions and the
temperature belong to the policy, not to the recipe.

Sources: NVIDIA's released training code (adapters on a frozen Qwen3); the paper's text and its
tables 2 to 4 (all weights, a borrowed neuron); a measured recipe for the 260K-parameter model that
ships with this library.
"""

import dataclasses
import math
from typing import Any, Literal

from dms_jax.errors import ConfigError
from dms_jax.policies import Policy
from dms_jax.training import schedules
from dms_jax.training.schedules import Number

Trainable = Literal["auto", "all", "adapter"]
Loss = Literal["distillation", "language_modeling"]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(f"recipe: {message}")


def _is_number(value: Any) -> bool:
    real = isinstance(value, Number) and not isinstance(value, bool)
    return real and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


@dataclasses.dataclass(frozen=True)
class Stage:
    """A run of optimizer steps with one objective.

    Attributes:
      kind: "neuron_decay" fades the borrowed neuron out and evicts nothing (left out for policies
        that borrow none); "ramp" moves the compression ratio linearly from where it stands.
      steps: optimizer steps.
      learning_rate: constant over the stage.
      compression_ratio: at the end of a ramp; the ratio so far gives a stage at constant ratio.
      adapter_learning_rate: of the adapter; None for the same.
      batch_size: sequences a step; None for the recipe's.
    """

    kind: Literal["neuron_decay", "ramp"]
    steps: int
    learning_rate: Number
    compression_ratio: Number = 1.0
    adapter_learning_rate: Number | None = None
    batch_size: int | None = None

    def __post_init__(self):
        _require(self.kind in ("neuron_decay", "ramp"), f"unknown kind of stage {self.kind!r}")
        _require(_is_count(self.steps), f"a stage needs steps >= 1, got {self.steps!r}")
        adapter_rate = self.adapter_learning_rate
        for rate in (self.learning_rate, 0.0 if adapter_rate is None else adapter_rate):
            _require(_is_number(rate) and rate >= 0, f"learning rates must be >= 0, got {rate!r}")
        _require(
            _is_number(self.compression_ratio) and self.compression_ratio >= 1,
            f"compression_ratio must be a number >= 1, got {self.compression_ratio!r}",
        )
        _require(
            self.batch_size is None or _is_count(self.batch_size),
            f"batch_size must be >= 1, got {self.batch_size!r}",
        )


@dataclasses.dataclass(frozen=True)
class Progress:
    """What one optimizer step aims at.

    Attributes:
      stage: the stage it belongs to.
      compression_ratio: scheduled.
      neuron_scale: what is left of the borrowed neuron; None outside its decay.
    """

    stage: Stage
    compression_ratio: Number
    neuron_scale: Number | None

    @property
    def target(self) -> Number:
        """Share of tokens to evict."""
        return schedules.eviction_target(self.compression_ratio)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A retrofit, but for the model, the policy and the data.

    Attributes:
      name: for the log.
      stages: in order.
      sequence_length: T, tokens a training sequence.
      batch_size: sequences an optimizer step.
      micro_batch_size: sequences that a device (a shard of the `data` axis) passes forward and
        back at a time; gradients are accumulated over the passes. None for the whole batch.
      trainable: "adapter" freezes everything else; "all" trains every weight; "auto" takes the
        adapter alone where the policy has one and all weights where it borrows a neuron.
      loss: "distillation" from the original model, or "language_modeling".
      kl: direction of the distillation, "reverse" = KL(student || teacher).
      beta1, beta2, epsilon, weight_decay: of AdamW; the decay spares norms and biases.
      clip: largest global norm of the gradient.
      compute_dtype: of the passes; None for that of the parameters. Parameters, gradients and
        optimizer state are in at least float32 whatever it is.
      remat: recompute each layer in the backward pass, for memory.
      packing: of documents into sequences (`dms_jax.data.batches`).
      ignore_end_token: leave the positions of the end token out of the loss.
      snapshots: compression ratios at which the model is handed out on the way.
    """

    name: str
    stages: tuple[Stage, ...]
    sequence_length: int
    batch_size: int
    micro_batch_size: int | None = None
    trainable: Trainable = "auto"
    loss: Loss = "distillation"
    kl: Literal["reverse", "forward"] = "reverse"
    beta1: Number = 0.9
    beta2: Number = 0.95
    epsilon: Number = 1e-8
    weight_decay: Number = 0.0
    clip: Number = 1.0
    compute_dtype: Literal["bfloat16", "float32"] | None = "bfloat16"
    remat: bool = True
    packing: Literal["concatenate", "concatenate_whole", "first_fit"] = "concatenate"
    ignore_end_token: bool = False
    snapshots: tuple[Number, ...] = ()

    def __post_init__(self):
        _require(bool(self.stages), "there is no stage")
        _require(
            all(isinstance(stage, Stage) for stage in self.stages), "stages must be Stage objects"
        )
        for name in ("sequence_length", "batch_size"):
            value = getattr(self, name)
            _require(_is_count(value), f"{name} must be a whole number >= 1, got {value!r}")
        micro = self.micro_batch_size
        _require(micro is None or _is_count(micro), f"micro_batch_size must be >= 1, got {micro!r}")
        self.pass_size(1)
        choices = {
            "trainable": ("auto", "all", "adapter"),
            "loss": ("distillation", "language_modeling"),
            "kl": ("reverse", "forward"),
            "compute_dtype": ("bfloat16", "float32", None),
            "packing": ("concatenate", "concatenate_whole", "first_fit"),
        }
        for name, allowed in choices.items():
            value = getattr(self, name)
            _require(value in allowed, f"{name} must be one of {allowed}, got {value!r}")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            _require(_is_number(value) and 0 <= value < 1, f"{name} must lie in [0, 1): {value!r}")
        for name in ("epsilon", "clip"):
            value = getattr(self, name)
            _require(_is_number(value) and value > 0, f"{name} must be positive, got {value!r}")
        _require(
            _is_number(self.weight_decay) and self.weight_decay >= 0,
            f"weight_decay must be >= 0, got {self.weight_decay!r}",
        )
        kinds = [stage.kind for stage in self.stages]
        _require("neuron_decay" not in kinds[1:], "only the first stage may decay the neuron")
        ratios = [stage.compression_ratio for stage in self.stages if stage.kind == "ramp"]
        _require(bool(ratios), "there is no ramp")
        _require(ratios == sorted(ratios), f"the compression ratio may not fall: {ratios}")
        _require(
            all(_is_number(ratio) and 1 < ratio <= ratios[-1] for ratio in self.snapshots),
            f"snapshots must lie above 1 and up to {ratios[-1]}, got {self.snapshots}",
        )

    def pass_size(self, data_shards: int) -> int:
        """Sequences that all devices together pass forward and back at a time.

        Raises:
          ConfigError: a batch does not divide into such passes.
        """
        micro = self.micro_batch_size
        size = self.batch_size if micro is None else micro * data_shards
        for stage in self.stages:
            batch = stage.batch_size or self.batch_size
            _require(
                batch % size == 0 and size % data_shards == 0,
                f"a batch of {batch} does not divide into passes of {size} sequences over "
                f"{data_shards} shards of data; set batch_size and micro_batch_size to suit",
            )
        return size

    @property
    def compression_ratio(self) -> Number:
        """Scheduled at the end."""
        return self.stages[-1].compression_ratio

    def stages_for(self, policy: Policy) -> tuple[Stage, ...]:
        """The stages that a policy goes through: one that borrows no neuron has none to decay."""
        if policy.borrowed_neurons is not None:
            return self.stages
        return tuple(stage for stage in self.stages if stage.kind == "ramp")

    def total_steps(self, policy: Policy) -> int:
        """Optimizer steps of a retrofit."""
        return sum(stage.steps for stage in self.stages_for(policy))

    def progress(self, step: int, policy: Policy) -> Progress:
        """What optimizer step `step` (from 0) aims at; past the end, what the last one reached."""
        ratio = 1.0
        for stage in self.stages_for(policy):
            if step < stage.steps:
                break
            step -= stage.steps
            ratio = stage.compression_ratio if stage.kind == "ramp" else ratio
        else:
            return Progress(stage, ratio, None)
        if stage.kind == "neuron_decay":
            return Progress(stage, 1.0, schedules.neuron_scale(step, steps=stage.steps))
        ratio = schedules.compression_ratio(
            step, start=ratio, end=stage.compression_ratio, steps=stage.steps
        )
        return Progress(stage, ratio, None)


def _ramp_steps(compression_ratio: Number, steps_per_ratio: int) -> int:
    _require(
        _is_number(compression_ratio) and compression_ratio > 1,
        f"compression_ratio must be a number above 1, got {compression_ratio!r}",
    )
    return max(1, round((compression_ratio - 1) * steps_per_ratio))


def dms_published(compression_ratio: Number = 8.0) -> Recipe:
    """NVIDIA's released recipe: adapters on a frozen model, 34 steps a unit of compression ratio.

    Qwen3-8B takes about 250 steps of 8 sequences of 32768 tokens to ratio 8. A policy that borrows
    a neuron trains all weights instead, after the paper's 2000 steps of decay.
    """
    return Recipe(
        name="dms_published",
        stages=(
            Stage("neuron_decay", 2000, 3e-5),
            Stage("ramp", _ramp_steps(compression_ratio, 34), 3e-5, compression_ratio),
        ),
        sequence_length=32768,
        batch_size=8,
        micro_batch_size=1,
        packing="concatenate_whole",
        ignore_end_token=True,
    )


@dataclasses.dataclass(frozen=True)
class _PaperRow:
    """A row of tables 2 and 3: how one model was retrofitted with DMS."""

    sequence_length: int
    decay_learning_rate: Number
    ramps: tuple[tuple[Number, int, Number], ...]  # up to this ratio: steps a unit, learning rate
    ramp_batch_size: int = 1024
    loss: Loss = "distillation"


_PAPER = {
    # The recipe of the paper's text; the tables give its learning rates.
    "text": _PaperRow(4096, 1e-6, ((math.inf, 100, 1e-5),)),
    "llama-3.2-1b": _PaperRow(4096, 1e-6, ((math.inf, 3000, 1e-5),)),
    "llama-2-7b": _PaperRow(4096, 3e-5, ((math.inf, 3000, 3e-5),), loss="language_modeling"),
    "llama-3.1-8b": _PaperRow(8192, 3e-5, ((math.inf, 2000, 3e-5),), loss="language_modeling"),
    "qwen-r1-1.5b": _PaperRow(8192, 1e-5, ((4, 3000, 1e-5), (8, 3000, 1e-5))),
    "qwen-r1-7b": _PaperRow(8192, 1e-6, ((4, 3000, 1e-5), (8, 3000, 2e-5))),
    "qwen-r1-32b": _PaperRow(8192, 1e-6, ((4, 4000, 1e-5),), ramp_batch_size=256),
}


def dms_paper(compression_ratio: Number = 4.0, *, model: str = "text") -> Recipe:
    """The paper's recipe: all weights, 2000 steps of neuron decay, then the ramp.

    Args:
      compression_ratio: to reach.
      model: "text" for the 100 steps a unit of the paper's text, or a row of its tables:
        llama-3.2-1b, llama-2-7b, llama-3.1-8b, qwen-r1-1.5b, qwen-r1-7b, qwen-r1-32b.

    Raises:
      ConfigError: there is no such row, or it does not go to this ratio.
    """
    _require(
        model in _PAPER, f"the paper has no model {model!r}; there are {', '.join(sorted(_PAPER))}"
    )
    row = _PAPER[model]
    _ramp_steps(compression_ratio, 1)
    stages = [Stage("neuron_decay", 2000, row.decay_learning_rate, batch_size=1024)]
    reached = 1.0
    for limit, steps_per_ratio, learning_rate in row.ramps:
        end = min(limit, compression_ratio)
        if end > reached:
            steps = _ramp_steps(1 + end - reached, steps_per_ratio)
            stages.append(Stage("ramp", steps, learning_rate, float(end)))
            reached = end
    _require(
        reached == compression_ratio,
        f"the paper takes {model} to a compression ratio of {reached:g}, not {compression_ratio:g}",
    )
    return Recipe(
        name=f"dms_paper {model}",
        stages=tuple(stages),
        sequence_length=row.sequence_length,
        batch_size=row.ramp_batch_size,
        micro_batch_size=1,
        trainable="all",
        loss=row.loss,
        weight_decay=0.1,
    )


def dms_quickstart(
    compression_ratio: Number = 8.0,
    *,
    steps_per_ratio: int = 15,
    snapshots: tuple[Number, ...] = (),
) -> Recipe:
    """For the 260K-parameter model of the demo, on a laptop: all weights and the adapter.

    With window 64 and ratio 8 it takes 105 steps of 4 sequences of 512 tokens.
    """
    steps = _ramp_steps(compression_ratio, steps_per_ratio)
    return Recipe(
        name="dms_quickstart",
        stages=(Stage("ramp", steps, 1e-4, compression_ratio, adapter_learning_rate=3e-4),),
        sequence_length=512,
        batch_size=4,
        trainable="all",
        compute_dtype=None,
        remat=False,
        snapshots=snapshots,
    )
