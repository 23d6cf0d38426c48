"""The recipe of a training run, its stages, and the schedules over the steps of a stage.

    ratio(t)  = start + (end - start) * min(t / steps, 1),     target(t) = 1 - 1 / ratio(t)
    neuron(t) = max(0, 1 - t / steps)
    rate(t)   = peak * (t + 1) / warmup                                          for t < warmup
                final + (peak - final) * (1 + cos(pi * (t - warmup) / (steps - warmup))) / 2   then

The ramp is linear in the compression ratio, not in the share of evicted tokens. NVIDIA's adapters
go from 1 to 16 in 510 steps (34 per unit); the paper takes 100 steps per unit.
"""

import dataclasses
import math
from typing import Annotated, Literal

from dms_jax.checks import (
    Count,
    NotNegative,
    Number,
    Options,
    Positive,
    Range,
    Ratio,
    Share,
    Whole,
    check,
    require,
)
from dms_jax.model.low_rank import LowRank
from dms_jax.model.rematerialisation import Remat
from dms_jax.policies import Policy
from dms_jax.training.parameters import Trained

Trainable = Literal["auto", "all", "low_rank", "adapter"]
Loss = Literal["distillation", "language_modeling"]
DistillationPositions = Literal["targets", "inputs"]
Decay = Annotated[Number, Range(0, 1, below=True)]


@dataclasses.dataclass(frozen=True)
class Stage(Options):
    """A run of optimizer steps with one objective.

    Attributes:
      kind: "neuron_decay" fades the borrowed neuron out and evicts nothing (skipped for policies
        that borrow none); "ramp" moves the compression ratio linearly from its current value;
        "train" keeps the current value (1 before any ramp); "supervise" evicts nothing and trains
        only the adapter, to predict how much attention each token gets (`Retrofit.supervision`).
      steps: optimizer steps.
      learning_rate: learning rate, constant over the stage except for warm-up and decay.
      compression_ratio: compression ratio at the end of a ramp.
      adapter_learning_rate: learning rate of the adapter; None for `learning_rate`.
      batch_size: sequences per step; None for the recipe's batch size.
      warmup_steps: steps at the start of the stage over which the rate rises linearly from zero.
      final_learning_rate: rate at the end of a half-cosine decay over the rest of the stage, for
        every parameter; None for no decay.
    """

    kind: Literal["neuron_decay", "ramp", "train", "supervise"]
    steps: Count
    learning_rate: NotNegative
    compression_ratio: Ratio = 1.0
    adapter_learning_rate: NotNegative | None = None
    batch_size: Count | None = None
    warmup_steps: Whole = 0
    final_learning_rate: NotNegative | None = None

    def __post_init__(self):
        super().__post_init__()
        require(
            self.warmup_steps <= self.steps,
            f"Stage: warmup_steps must lie between 0 and the stage's {self.steps} steps, got "
            f"{self.warmup_steps}.",
        )
        require(
            self.kind == "ramp" or self.compression_ratio == 1,
            f"Stage: only a ramp changes the compression_ratio, not a stage {self.kind!r}.",
        )


def eviction_target(ratio: Number) -> Number:
    """Returns the share of tokens to evict for a compression ratio.

    # In: 8  Out: 0.875
    """
    return 1.0 - 1.0 / ratio


@dataclasses.dataclass(frozen=True)
class Progress:
    """The settings of one optimizer step.

    Attributes:
      stage: the stage that the step belongs to.
      step: number of the step within the stage, from 0.
      compression_ratio: scheduled compression ratio.
      neuron_scale: scale of the borrowed neuron; None outside its decay.
    """

    stage: Stage
    step: int
    compression_ratio: Number
    neuron_scale: Number | None

    @property
    def target(self) -> Number:
        """Scheduled share of tokens to evict."""
        return eviction_target(self.compression_ratio)

    @property
    def learning_rate(self) -> Number:
        """Scheduled learning rate of all parameters except the adapter."""
        return self._rate(self.stage.learning_rate)

    @property
    def adapter_learning_rate(self) -> Number:
        """Scheduled learning rate of the adapter."""
        rate = self.stage.adapter_learning_rate
        return self._rate(self.stage.learning_rate if rate is None else rate)

    def _rate(self, peak: Number) -> Number:
        """Returns the rate at this step; past the end of the stage, the last one."""
        warmup, final = self.stage.warmup_steps, self.stage.final_learning_rate
        if self.step < warmup:
            return peak * (self.step + 1) / warmup
        if final is None:
            return peak
        passed = min(1.0, (self.step - warmup) / max(self.stage.steps - warmup, 1))
        return final + (peak - final) * 0.5 * (1 + math.cos(math.pi * passed))


@dataclasses.dataclass(frozen=True)
class Recipe(Options):
    """All settings of a training run except the model, the policy and the data.

    Attributes:
      name: name for messages.
      stages: the stages in order.
      sequence_length: T, tokens per training sequence.
      batch_size: sequences per optimizer step.
      micro_batch_size: sequences that a device (a shard of the `data` axis) processes in one
        forward and backward pass; gradients are accumulated over the passes. None for the whole
        batch.
      trainable: "adapter" freezes everything else; "low_rank" trains low-rank updates of the
        attention projections (LoRA) and the adapter if the policy has one, at their two learning
        rates; "all" trains every weight; "auto" trains only the adapter if the policy has one, and
        all weights if it borrows a neuron.
      low_rank: rank and alpha of the updates that "low_rank" trains.
      loss: "distillation" from the original model, or "language_modeling".
      distillation_temperature: T, by which the logits of student and teacher are divided; the loss
        is multiplied by T^2, so that its gradients keep their scale relative to the compression
        loss.
      text_weight: weight of the language modelling loss beside the distillation: the student also
        learns from the texts themselves, for texts that are better than what the teacher writes on
        average, such as its own correct answers. Needs distillation at "targets".
      distillation_positions: positions where student and teacher are compared. The logits at
        position t predict token t + 1: "targets" takes the positions whose next token counts, like
        the language modelling loss; "inputs" the positions whose own token counts, like NVIDIA's
        code.
      compression_weight: weight of the compression loss (`dms_jax.training.compression_loss`); the
        main loss has weight 1.
      beta1, beta2, epsilon, weight_decay: settings of AdamW; norms and biases do not decay.
      clip: largest global norm of the gradient.
      compute_dtype: dtype of the passes; None for the parameters' dtype. Parameters, gradients and
        optimizer state are always in at least float32.
      remat: what the backward pass recomputes of each layer: "nothing" (most memory);
        "all_but_products" (keeps the outputs of matrix products and of attention);
        "all_but_attention" (keeps the outputs of attention); or "everything". "auto" keeps the
        outputs of products if memory allows, otherwise those of attention
        (`dms_jax.training.remat`).
      unroll: whether to unroll the loop over layers: faster for small models, slower to compile.
      packing: how documents are packed into sequences (`dms_jax.data.batches`).
      ignore_end_token: whether the model's end tokens are excluded from the loss, also in batches
        given as data.
      answers_only: whether only answers count in the loss (the assistant's turns, responses to
        prompts). Batches given as data have their own loss mask.
      snapshots: compression ratios at which the model is saved and handed to `on_snapshot`.
    """

    name: str
    stages: tuple[Stage, ...]
    sequence_length: Count
    batch_size: Count
    micro_batch_size: Count | None = None
    trainable: Trainable = "auto"
    low_rank: LowRank = dataclasses.field(default_factory=LowRank)
    loss: Loss = "distillation"
    distillation_temperature: Positive = 1.0
    text_weight: NotNegative = 0.0
    distillation_positions: DistillationPositions = "targets"
    compression_weight: NotNegative = 1.0
    beta1: Decay = 0.9
    beta2: Decay = 0.95
    epsilon: Positive = 1e-8
    weight_decay: NotNegative = 0.0
    clip: Positive = 1.0
    compute_dtype: Literal["bfloat16", "float32"] | None = "bfloat16"
    remat: Remat | Literal["auto"] = "auto"
    unroll: bool = False
    packing: Literal["concatenate", "concatenate_whole", "first_fit"] = "concatenate"
    ignore_end_token: bool = False
    answers_only: bool = False
    snapshots: tuple[Number, ...] = ()

    def __post_init__(self):
        super().__post_init__()
        require(bool(self.stages), "Recipe: there is no stage.")
        self.pass_size(1)
        kinds = [stage.kind for stage in self.stages]
        require(
            "neuron_decay" not in kinds[1:], "Recipe: only the first stage may decay the neuron."
        )
        require(kinds != ["neuron_decay"], "Recipe: nothing comes after the decay of the neuron.")
        require(
            not self.text_weight
            or (self.loss, self.distillation_positions) == ("distillation", "targets"),
            "Recipe: text_weight adds a loss on the text to the distillation at the positions of "
            "targets; it needs loss='distillation' and distillation_positions='targets'.",
        )
        ratios = [stage.compression_ratio for stage in self.stages if stage.kind == "ramp"]
        require(ratios == sorted(ratios), f"Recipe: the compression ratio may not fall: {ratios}.")
        highest = self.compression_ratio
        require(
            all(1 < ratio <= highest for ratio in self.snapshots),
            f"Recipe: snapshots must lie above 1 and up to {highest}, got {self.snapshots}.",
        )

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The sequences of a step in each stage."""
        return tuple(map(self.batch_of, self.stages))

    def batch_of(self, stage: Stage) -> int:
        """Returns the sequences of a step of a stage."""
        return stage.batch_size or self.batch_size

    def pass_size(self, data_shards: int) -> int:
        """Returns the sequences that all devices together process in one pass.

        Raises:
          ConfigError: a batch does not divide into such passes.
        """
        micro = self.micro_batch_size
        size = self.batch_size if micro is None else micro * data_shards
        for batch in self.batch_sizes:
            require(
                batch % size == 0 and size % data_shards == 0,
                f"Recipe: a batch of {batch} does not divide into passes of {size} sequences over "
                f"{data_shards} shards of data. Change `batch_size` or `micro_batch_size`.",
            )
        return size

    @property
    def supervises(self) -> bool:
        """Whether a stage teaches the decisions from attention."""
        return any(stage.kind == "supervise" for stage in self.stages)

    @property
    def compression_ratio(self) -> Number:
        """The compression ratio at the end; 1 without a ramp."""
        return max(stage.compression_ratio for stage in self.stages)

    def trained_for(self, policy: Policy) -> Trained:
        """Returns which parameters a retrofit for a policy trains: `trainable`, "auto" resolved."""
        if self.trainable == "auto":
            return "adapter" if policy.retrofit.adapter else "all"
        return self.trainable

    def stages_for(self, policy: Policy) -> tuple[Stage, ...]:
        """Returns the stages that a policy goes through.

        A trainable policy that borrows no neuron skips its decay. A policy that learns nothing
        goes through all stages as ordinary steps.
        """
        if policy.retrofit.borrowed_neurons is not None or not policy.retrofit.possible:
            return self.stages
        return tuple(stage for stage in self.stages if stage.kind != "neuron_decay")

    def control(self, policy: Policy) -> "Recipe":
        """Returns the recipe of a retrofit's control: the same tokens and rates, no eviction.

        The control runs the same stages with the vanilla cache and the language modelling loss:
        `train(model, recipe=recipe.control(policy), data=...)`. It trains low-rank updates if the
        retrofit does, otherwise all weights. The vanilla cache reads no adapter, so for a retrofit
        of frozen weights the original model is the control.

        Args:
          policy: the policy of the retrofit.
        """
        return dataclasses.replace(
            self,
            name=f"{self.name} control",
            stages=tuple(
                dataclasses.replace(stage, kind="train", compression_ratio=1.0)
                for stage in self.stages_for(policy)
            ),
            trainable="low_rank" if self.trainable == "low_rank" else "all",
            loss="language_modeling",
            snapshots=(),
        )

    def settled(self, share: Number) -> "Recipe":
        """Returns the recipe with a shorter last ramp, after which the rates fall to zero.

        Args:
          share: share of the last stage's steps that keep the final ratio.

        Raises:
          ConfigError: `share` is not in [0, 1), or the last stage is no ramp.
        """
        share = check("Recipe.settled: share", share, Decay)
        *before, ramp = self.stages
        require(ramp.kind == "ramp", f"Recipe.settled: the last stage is {ramp.kind}, not a ramp.")
        steps = min(round(share * ramp.steps), ramp.steps - 1)
        if not steps:
            return self
        stages = (
            dataclasses.replace(ramp, steps=ramp.steps - steps),
            dataclasses.replace(
                ramp, kind="train", steps=steps, compression_ratio=1.0, final_learning_rate=0
            ),
        )
        return dataclasses.replace(self, stages=(*before, *stages))

    def warmed(self, share: Number) -> "Recipe":
        """Returns the recipe with rates that rise from zero over a share of its first stage.

        Raises:
          ConfigError: `share` is not between 0 and 1.
        """
        first, *rest = self.stages
        rising = round(check("Recipe.warmed: share", share, Share) * first.steps)
        return dataclasses.replace(
            self, stages=(dataclasses.replace(first, warmup_steps=rising), *rest)
        )

    def total_steps(self, policy: Policy) -> int:
        """Returns the number of optimizer steps of a run."""
        return sum(stage.steps for stage in self.stages_for(policy))

    def total_tokens(self, policy: Policy) -> int:
        """Returns the number of tokens of a run, padding included."""
        return self.sequence_length * sum(
            stage.steps * self.batch_of(stage) for stage in self.stages_for(policy)
        )

    def scaled(
        self, policy: Policy, *, steps: int | None = None, tokens: int | None = None
    ) -> "Recipe":
        """Returns the recipe with the number of steps of every stage scaled in proportion.

        Args:
          policy: the policy of the run; stages that it skips do not count.
          steps: optimizer steps of the whole run.
          tokens: alternatively, tokens of the whole run, padding included, to the nearest step.

        Raises:
          ConfigError: not exactly one of `steps` and `tokens` is given, or a stage would have no
            step.
        """
        require((steps is None) != (tokens is None), "Recipe: give the number of steps or tokens.")
        total = self.total_steps(policy)
        if tokens is not None:
            wanted = round(
                int(check("Recipe: tokens", tokens, Count)) * total / self.total_tokens(policy)
            )
        else:
            wanted = int(check("Recipe: steps", steps, Count))
        taken = self.stages_for(policy)
        require(
            wanted >= len(taken),
            f"Recipe: {self.name} has {len(taken)} stages, so it takes at least {len(taken)} "
            f"steps, not {wanted}.",
        )
        stages, passed, end = [], 0, 0
        for stage in self.stages:
            count = max(1, round(stage.steps * wanted / total))
            if stage in taken:
                passed += stage.steps
                left = len(taken) - taken.index(stage) - 1
                before, end = end, max(end + 1, min(round(passed * wanted / total), wanted - left))
                count = end - before
            warmup = min(count, round(stage.warmup_steps * count / stage.steps))
            stages.append(dataclasses.replace(stage, steps=count, warmup_steps=warmup))
        return dataclasses.replace(self, stages=tuple(stages))

    def progress(self, step: int, policy: Policy) -> Progress:
        """Returns the settings of optimizer step `step` (from 0); past the end, the last ones.

        A policy that learns nothing goes through the same steps at a ratio of 1.
        """
        ratio = 1.0
        for stage in self.stages_for(policy):
            start, ratio = ratio, stage.compression_ratio if stage.kind == "ramp" else ratio
            if step < stage.steps:
                break
            step -= stage.steps
        else:
            step = stage.steps
        if not policy.retrofit.possible:
            return Progress(stage, step, 1.0, None)
        if stage.kind == "neuron_decay":
            return Progress(stage, step, 1.0, max(0.0, 1.0 - step / stage.steps))
        if step < stage.steps:
            ratio = start + (ratio - start) * (step / stage.steps)
        return Progress(stage, step, ratio, None)
