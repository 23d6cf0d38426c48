"""What is trained, and what is measured.

A training retrofits one model, and is named by what it changes. Everything that needs no training
gets the budget at which its peak equals the one that the reference retrofit was measured with.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import dms_jax
from dms_jax import recipes
from dms_jax.policies import Policy
from dms_jax.training import Recipe, Stage
from experiments.reproduction.real.settings import Config

QWEN, SMOLLM2 = "qwen", "smollm2"
VANILLA = "vanilla"
_WINDOW_16 = dms_jax.DMS(window=16, source="adapter")
_WINDOW_64 = dms_jax.DMS(window=64, source="adapter")
FLOAT8 = "float8_e4m3"
_RATES = {"adapter": 3e-5, "low_rank": 3e-4, "all": 3e-5}
MEASURES = {
    QWEN: ("gsm8k",),
    SMOLLM2: ("hellaswag", "arc_easy", "arc_challenge", "piqa", "text", "needle"),
}

OTHERS = ("math500", "humaneval", "ruler")  # asked of a few systems of Qwen


@dataclasses.dataclass(frozen=True)
class Training:
    """One retrofit.

    Attributes:
      name: for files and tables.
      model: which model.
      policy: what is learned; None for the control, which is trained further and evicts nothing.
      ratio: the nominal compression ratio at the end.
      snapshots: ratios on the way at which it is measured too.
      trainable: the adapter alone, low-rank updates too, or all weights.
      rate, adapter_rate: learning rates; None for `_RATES`.
      keep: which answers are trained on.
      answers_only: whether prompts are left out of the loss.
      share: tokens, as a multiple of the plan's.
      settle: share of the steps at the end that keep the ratio while the rates fall.
      warmup: share of the first stage's steps in which the rates rise from zero.
      make: another recipe, from (config, tokens).
    """

    name: str
    model: str = QWEN
    policy: Policy | None = _WINDOW_16
    ratio: float = 3.5
    snapshots: tuple[float, ...] = ()
    trainable: Literal["adapter", "low_rank", "all"] = "all"
    rate: float | None = None
    adapter_rate: float = 3e-4
    keep: Literal["ended", "correct"] = "ended"
    answers_only: bool = True
    share: float = 1.0
    settle: float = 0.3
    warmup: float = 0.0
    make: Callable[..., Recipe] | None = None

    @property
    def settings(self) -> tuple[float, ...]:
        """The ratios at which it is measured."""
        return (*self.snapshots, self.ratio)

    @property
    def adapter_only(self) -> bool:
        """Whether what is saved lies beside the weights."""
        return self.trainable != "all" and self.policy is not None

    def recipe(self, config: Config) -> Recipe:
        """Everything but model, policy and data."""
        tokens = round(self.share * (config.tokens if self.model == QWEN else config.small_tokens))
        sizes: dict[str, Any] = dict(
            tokens=tokens,
            adapter_learning_rate=self.adapter_rate,
            sequence_length=config.sequence_length,
            batch_size=config.batch_size,
        )
        if self.make is not None:
            recipe = self.make(**sizes)
        else:
            recipe = recipes.dms_self_taught(
                self.ratio,
                trainable=self.trainable,
                learning_rate=_RATES[self.trainable] if self.rate is None else self.rate,
                settle=self.settle,
                **sizes,
            )
        recipe = dataclasses.replace(
            recipe.warmed(self.warmup),
            name=self.name,
            snapshots=self.snapshots,
            answers_only=self.answers_only,
            micro_batch_size=config.micro_batch_size,
        )
        return recipe if self.policy is not None else recipe.control(_WINDOW_16)


def _merging(ratio: float = 4.0, **sizes: Any) -> Recipe:
    """DMC: a neuron is faded out first, and the rates are those that `dmc` was compared with."""
    tokens, each = sizes["tokens"], sizes["batch_size"] * sizes["sequence_length"]
    steps = max(10, round(tokens / each))
    decay, ramp = steps // 5, steps // 2
    return Recipe(
        name="dmc",
        stages=(
            Stage("neuron_decay", decay, 1e-4),
            Stage("ramp", ramp, 1e-4, ratio),
            Stage("train", steps - decay - ramp, 1e-4, final_learning_rate=1e-5),
        ),
        sequence_length=sizes["sequence_length"],
        batch_size=sizes["batch_size"],
        trainable="all",
        compression_weight=10.0,
        packing="first_fit",
        snapshots=(2.0,),
    )


# Rates that rise and fall slowly, and prompts in the loss: what keeps a model near to itself.
_GENTLY: dict[str, Any] = dict(answers_only=False, warmup=0.1, settle=0.5)
_TO_8: dict[str, Any] = dict(ratio=8.0, snapshots=(2.0, 4.0))
# What a verdict was to be about before anything was measured, and sets budgets; what ships.
PLANNED, SHIPPED = "all-w16", "smollm2-adapter-w16"
TRAININGS = {
    training.name: training
    for training in (
        # What the verdict needs, and the least that it could do without.
        Training(PLANNED),
        Training("control", policy=None),
        Training("near-w16", rate=1e-5, answers_only=False, warmup=0.1),
        Training("low-rank-w16", trainable="low_rank"),
        Training("low-rank-near-w16", trainable="low_rank", rate=2e-4, **_GENTLY),
        Training("adapter-w16", trainable="adapter"),
        # SmolLM2: what ships is an adapter beside frozen weights.
        Training(
            SHIPPED,
            model=SMOLLM2,
            ratio=4.0,
            snapshots=(2.0,),
            trainable="adapter",
            answers_only=False,
        ),
        Training("smollm2-all-w16", model=SMOLLM2, ratio=4.0, snapshots=(2.0,), answers_only=False),
        Training("smollm2-control", model=SMOLLM2, policy=None, answers_only=False),
        # What the recipe could be otherwise.
        Training("ramp-to-8", **_TO_8),
        Training("near-ramp-to-8", rate=1e-5, answers_only=False, warmup=0.1, **_TO_8),
        Training("low-rank-ramp-to-8", trainable="low_rank", **_TO_8),
        Training("dmc", policy=dms_jax.DMC(), ratio=4.0, snapshots=(2.0,), make=_merging),
        Training("near-long-w16", rate=1e-5, share=2.0, **_GENTLY),
        Training("near-slow-w16", rate=3e-6, **_GENTLY),
        Training("low-rank-long-w16", trainable="low_rank", rate=2e-4, share=2.0, **_GENTLY),
        Training("adapter-long-w16", trainable="adapter", share=2.0, **_GENTLY),
        Training("near-w64", policy=_WINDOW_64, ratio=6.0, rate=1e-5, **_GENTLY),
        Training("low-rank-w64", policy=_WINDOW_64, ratio=6.0, trainable="low_rank", **_GENTLY),
        Training("all-w64", policy=_WINDOW_64, ratio=6.0),
        Training("correct-w16", keep="correct"),
        Training("slow-w16", rate=1e-5),
        Training("prompts-w16", answers_only=False),
        Training("warm-w16", warmup=0.1),
        Training("falling-w16", settle=0.6),
        Training(
            "smollm2-low-rank-w16",
            model=SMOLLM2,
            ratio=4.0,
            trainable="low_rank",
            answers_only=False,
        ),
        Training("long-w16", share=2.0),
    )
}
REFERENCE = {QWEN: PLANNED, SMOLLM2: SHIPPED}


@dataclasses.dataclass(frozen=True)
class Free:
    """A method that needs no training, or that asks a trained model in another way.

    Attributes:
      name: for files and tables.
      make: policy from the calibrated budget in tokens (a share of the length, where it has a
        ratio); None for one that has no budget.
      equal: what is as large as the reference's: its peak, or the mean of its live tokens.
      kv_dtype: of the cache.
      trained: the training whose model is asked, at its last ratio; None for the model itself.
      times: the budget is so many times the calibrated one.
    """

    name: str
    make: Callable[..., Policy] | None = None
    equal: Literal["peak", "mean"] = "peak"
    kv_dtype: str | None = None
    trained: str | None = None
    times: float = 1.0
    models: tuple[str, ...] = (QWEN, SMOLLM2)


def _snapkv(**budget: Any) -> Policy:
    return _periodic(dms_jax.SnapKV, window=16, **budget)


def _expected(**budget: Any) -> Policy:
    return _periodic(dms_jax.ExpectedAttention, **budget)


INTERVAL = 16  # tokens between two cuts; half of it is taken off the budget


def _periodic(kind: Any, **fields: Any) -> Policy:
    """Rows grow by the interval between cuts, so that their peak is budget + interval."""
    if "budget" in fields:
        fields["budget"] = max(fields["budget"] - INTERVAL, 24)
    return kind(interval=INTERVAL, **fields)


def _kcache(**budget: Any) -> Policy:
    top = budget.pop("budget", None)
    return dms_jax.KCache(**({"top": top} if top else budget), values="device")


FREE = {
    free.name: free
    for free in (
        Free(VANILLA),
        Free("tova", dms_jax.TOVA),
        Free("expected", _expected),
        Free("snapkv", _snapkv),
        Free("streaming", dms_jax.StreamingLLM),
        Free("h2o", dms_jax.H2O),
        Free("quest", dms_jax.Quest),
        Free("kcache", _kcache),
        Free("vanilla-float8", kv_dtype=FLOAT8),
        Free("dms-float8", trained=PLANNED, kv_dtype=FLOAT8, models=(QWEN,)),
        Free("tova-mean", dms_jax.TOVA, equal="mean", models=(QWEN,)),
        Free("expected-mean", _expected, equal="mean", models=(QWEN,)),
        Free("streaming-mean", dms_jax.StreamingLLM, equal="mean", models=(QWEN,)),
        Free("tova-half-more", dms_jax.TOVA, times=1.5, models=(QWEN,)),
        Free("expected-half-more", _expected, times=1.5, models=(QWEN,)),
    )
}
