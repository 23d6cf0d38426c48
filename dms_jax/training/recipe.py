"""The recipe of a training run, its stages, and what each step aims at."""

import dataclasses
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
from dms_jax.training import schedules
from dms_jax.training.compression_loss import Prior
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
        that borrow none); "ramp" changes the compression ratio linearly from its current value;
        "train" keeps the current value, which is 1 before any ramp; "supervise" evicts nothing and
        teaches the adapter alone what attention makes of each token (`Retrofit.supervision`).
      steps: optimizer steps.
      learning_rate: learning rate, constant over the stage except for warm-up and decay.
      compression_ratio: compression ratio at the end of a ramp.
      adapter_learning_rate: learning rate of the adapter; None for the same.
      batch_size: sequences per step; None for the recipe's batch size.
      warmup_steps: steps at the start of the stage over which the rate rises linearly from zero.
      final_learning_rate: rate to which a half-cosine falls over the rest of the stage, for every
        parameter; None for no decay.
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


@dataclasses.dataclass(frozen=True)
class Progress:
    """What one optimizer step aims at.

    Attributes:
      stage: the stage that the step belongs to.
      step: number of the step within the stage, from 0.
      compression_ratio: scheduled compression ratio.
      neuron_scale: remaining scale of the borrowed neuron; None outside its decay.
    """

    stage: Stage
    step: int
    compression_ratio: Number
    neuron_scale: Number | None

    @property
    def target(self) -> Number:
        """Scheduled share of tokens to evict."""
        return schedules.eviction_target(self.compression_ratio)

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
        stage = self.stage
        return schedules.learning_rate(
            self.step,
            peak=peak,
            steps=stage.steps,
            warmup_steps=stage.warmup_steps,
            final=stage.final_learning_rate,
        )


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
      kl: direction of the distillation, "reverse" = KL(student || teacher).
      distillation_temperature: T, by which the logits of both are divided; the loss is multiplied
        by T^2, so that its gradients keep their scale beside the compression loss.
      distillation_positions: positions where student and teacher are compared. The logits at
        position t predict token t + 1: "targets" takes the positions whose next token counts, as
        the language modelling loss does; "inputs" those whose own token counts, as NVIDIA's code
        does.
      compression_weight: weight of the compression loss (`dms_jax.training.compression_loss`); the
        main loss has weight 1.
      prior: whether the target applies to all layers together ("global") or to each ("layer").
      head_balance: weight of a loss that keeps the heads of a layer similar (DMC-C); 0 for none.
      beta1, beta2, epsilon, weight_decay: settings of AdamW; norms and biases do not decay.
      clip: largest global norm of the gradient.
      compute_dtype: dtype of the passes; None for that of the parameters. Parameters, gradients
        and optimizer state are always in at least float32.
      remat: what the backward pass computes again of each layer: "nothing", which takes the most
        memory; "all_but_products", which keeps the outputs of matrix products and of attention;
        "all_but_attention", which keeps those of attention; or "everything". "auto" keeps the
        outputs of products where memory allows, and otherwise those of attention
        (`dms_jax.training.remat`).
      unroll: whether to unroll the loop over layers: faster for small models, slower to compile.
      packing: how documents are packed into sequences (`dms_jax.data.batches`).
      ignore_end_token: whether the model's end tokens are left out of the loss, also where the
        data brings its own batches.
      answers_only: whether only answers count in the losses of the model's output: the assistant's
        turns, and responses to prompts. A batch that the data brings has its own loss mask.
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
    kl: Literal["reverse", "forward"] = "reverse"
    distillation_temperature: Positive = 1.0
    distillation_positions: DistillationPositions = "targets"
    compression_weight: NotNegative = 1.0
    prior: Prior = "global"
    head_balance: NotNegative = 0.0
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
        return tuple(stage.batch_size or self.batch_size for stage in self.stages)

    def pass_size(self, data_shards: int) -> int:
        """Returns the sequences that all devices together process in one pass.

        Raises:
          ConfigError: a batch does not divide into such passes.
        """
        micro = self.micro_batch_size
        size = self.batch_size if micro is None else micro * data_shards
        for stage in self.stages:
            batch = stage.batch_size or self.batch_size
            require(
                batch % size == 0 and size % data_shards == 0,
                f"Recipe: a batch of {batch} does not divide into passes of {size} sequences over "
                f"{data_shards} shards of data. Change batch_size or micro_batch_size.",
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
        """Returns what a retrofit for a policy trains: `trainable`, with "auto" decided."""
        if self.trainable == "auto":
            return "adapter" if policy.retrofit.adapter else "all"
        return self.trainable

    def stages_for(self, policy: Policy) -> tuple[Stage, ...]:
        """Returns the stages that a policy goes through.

        A trainable policy that borrows no neuron skips its decay. A policy that learns nothing
        goes through all stages as ordinary steps; `control` gives the recipe that skips what the
        policy of a retrofit skips.
        """
        if policy.retrofit.borrowed_neurons is not None or not policy.retrofit.possible:
            return self.stages
        return tuple(stage for stage in self.stages if stage.kind != "neuron_decay")

    def control(self, policy: Policy) -> "Recipe":
        """Returns the recipe of a retrofit's control: the same tokens and rates, no eviction.

        The control goes through the same stages with the vanilla cache and trains on the language
        modelling loss: `train(model, recipe=recipe.control(policy), data=...)`. It trains low-rank
        updates if the retrofit does, so that both can change as much, and all weights otherwise.
        The vanilla cache reads no adapter: beside a retrofit of frozen weights the original itself
        is the control of what they lose, and this one only of what the tokens teach.

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
        """Returns the recipe with a last ramp that ends earlier, and rates that then fall to zero.

        Args:
          share: share of the last stage's steps that keep the ratio that was reached.

        Raises:
          ConfigError: the share is not one, or the last stage is no ramp.
        """
        share = check("Recipe.settled: share", share, Decay)
        *before, ramp = self.stages
        require(ramp.kind == "ramp", f"Recipe.settled: the last stage is no ramp but {ramp.kind}.")
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
          ConfigError: it is no share.
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
            stage.steps * (stage.batch_size or self.batch_size) for stage in self.stages_for(policy)
        )

    def scaled(
        self, policy: Policy, *, steps: int | None = None, tokens: int | None = None
    ) -> "Recipe":
        """Returns the recipe shortened or lengthened: every stage in proportion, nothing else.

        Args:
          policy: the policy of the run; stages that it skips do not count.
          steps: optimizer steps of the whole run.
          tokens: tokens of the whole run instead, padding included, to the nearest step.

        Raises:
          ConfigError: not exactly one of the two is given, or they leave a stage without a step.
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
        """Returns what optimizer step `step` (from 0) aims at; past the end, the last step's aims.

        A policy that learns nothing goes through the same steps at a ratio of 1.
        """
        ratio = 1.0
        for stage in self.stages_for(policy):
            if step < stage.steps:
                break
            step -= stage.steps
            ratio = stage.compression_ratio if stage.kind == "ramp" else ratio
        else:
            return Progress(stage, stage.steps, ratio if policy.retrofit.possible else 1.0, None)
        if stage.kind == "neuron_decay":
            if not policy.retrofit.possible:
                return Progress(stage, step, 1.0, None)
            scale = schedules.neuron_scale(step, steps=stage.steps)
            return Progress(stage, step, 1.0, scale)
        if stage.kind == "ramp":
            ratio = schedules.compression_ratio(
                step, start=ratio, end=stage.compression_ratio, steps=stage.steps
            )
        return Progress(stage, step, ratio if policy.retrofit.possible else 1.0, None)
