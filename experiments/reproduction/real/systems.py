"""What is trained, and what is measured.

A training retrofits one model, and is named by what it changes. Everything that needs no training
gets the budget at which its peak equals the one that the reference retrofit was measured with; some
methods are also asked with as much as the low-rank retrofits to 2, 4 and 8 hold (`LIKE`).
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any, Literal

import dms_jax
from dms_jax import recipes
from dms_jax.policies import Policy
from experiments.reproduction.real.settings import Config
from experiments.reproduction.real.sweep import CENTRE, SWEEPS
from experiments.reproduction.real.training import QWEN, SMOLLM2, WINDOW, Training, merging, scorer

VANILLA = "vanilla"
FLOAT8 = "float8_e4m3"
CHOICES = "choices"  # four tasks that are answered by likelihood, asked together
MEASURES = {QWEN: ("gsm8k",), SMOLLM2: (CHOICES, "text", "needle")}

FRONTIER, HALF = "frontier", "frontier-half"
FRONTIERS = {FRONTIER: 1, HALF: 2}  # chains of which a vote is taken -> share of the new tokens
UNSEEN = "unseen"  # greedy answers to training questions that are in no lesson
# RULER's tasks that need no file and are not the two needles, asked together; of SmolLM2 shorter.
RULER_TASKS, SHORT_TASKS = "ruler_tasks", "short_ruler_tasks"
# Asked of a few systems: other tasks, and retrieval from twice and four times as many tokens.
OTHERS = {
    QWEN: (
        *("math500", "humaneval", "ruler", "ruler-twice", "ruler-four-times"),
        *(RULER_TASKS, f"{RULER_TASKS}-twice", f"{RULER_TASKS}-four-times"),
    ),
    SMOLLM2: (
        *("needle-twice", "needle-four-times"),
        *(SHORT_TASKS, f"{SHORT_TASKS}-twice", f"{SHORT_TASKS}-four-times"),
    ),
}


# The judged adapters of earlier runs, so that they can be asked more.
KEPT = pathlib.Path(__file__).parents[2] / "results" / "real_models" / "adapters"
# The verdict is about one of the rivals, which questions in no lesson choose (`Results.judged`),
# or about the training that the settings name.
PLANNED, RIVAL, CONTROL = "low-rank-w16", "warm-up-w16", "control"
_RATIO = 3.3  # 3.5 gave a peak 3.22 times smaller; the bar is 3
TO_4 = "low-rank-to-4"
_SHARE = 0.3  # of the tokens, of what is compared among itself
SHIPPED = "smollm2-adapter-w16"
_NOMINAL = (2.0, 4.0, 8.0)
TRAININGS = {
    training.name: training
    for training in (
        Training(PLANNED, ratio=_RATIO, snapshots=(2.0,)),
        Training(RIVAL, ratio=_RATIO, make=recipes.dms_warm_up, words="from attention first"),
        Training(CONTROL, policy=None, ratio=_RATIO),
        Training(TO_4, ratio=4.0, snapshots=(2.0,), share=_SHARE),
        Training(
            "kvzap",
            policy=dms_jax.KVzap(window=WINDOW),
            ratio=_RATIO,
            budgets=_NOMINAL,
            trainable="adapter",
            share=_SHARE,
            make=scorer(recipes.kvzap),
        ),
        Training(
            "kvpop",
            policy=dms_jax.KVpop(budget=128, window=WINDOW, prefill="evict_past_budget"),
            ratio=_RATIO,
            budgets=_NOMINAL,
            trainable="adapter",
            share=_SHARE,
            make=scorer(recipes.kvpop),
        ),
        Training(
            "kvzap-w128",
            policy=dms_jax.KVzap(window=128),
            ratio=_RATIO,
            trainable="adapter",
            share=_SHARE,
            make=scorer(recipes.kvzap),
            of="kvzap",
            asked=("ruler", RULER_TASKS),  # an answer to GSM8K has no more at its peak
        ),
        Training(
            "dmc",
            policy=dms_jax.DMC(),
            ratio=4.0,
            snapshots=(2.0,),
            trainable="all",
            share=_SHARE,
            make=merging,
        ),
        Training("low-rank-to-8", ratio=8.0, share=_SHARE),
        Training("adapter-to-4", ratio=4.0, snapshots=(2.0,), trainable="adapter", share=_SHARE),
        Training("all-to-4", ratio=4.0, snapshots=(2.0,), trainable="all", share=_SHARE),
        Training(
            "floor-to-4",
            ratio=4.0,
            share=_SHARE,
            make=recipes.dms_layer_floor,
            words="with a floor a layer",
        ),
        Training("adapter-to-8", ratio=8.0, trainable="adapter", share=_SHARE),
        Training("all-to-8", ratio=8.0, trainable="all", share=_SHARE),
        Training(
            "shift-0",
            policy=dms_jax.DMS(window=WINDOW, shift=0, source="adapter"),
            ratio=_RATIO,
            make=recipes.dms_warm_up,
            words="deciding for itself (shift 0), from attention first",
        ),
        Training(
            "mixed",
            ratio=_RATIO,
            make=recipes.dms_warm_up,
            words="from attention first, texts and retrieval too",
            lessons="mixed",
            asked=("gsm8k", RULER_TASKS, "math500", "humaneval", "ruler"),
        ),
        Training(
            "mixed-w128",
            policy=dms_jax.DMS(window=128, source="adapter"),
            ratio=_RATIO,
            make=recipes.dms_warm_up,
            words="from attention first, texts and retrieval too",
            lessons="mixed",
            asked=(RULER_TASKS, "gsm8k", "ruler"),
        ),
        Training(
            "long",
            ratio=_RATIO,
            share=3.0,
            make=recipes.dms_warm_up,
            words="from attention first",
        ),
        Training(
            "warm-up-w16-kept", ratio=_RATIO, ships="warm-up-w16", words="the adapter of run 3"
        ),
        Training("smollm2-low-rank-w16", model=SMOLLM2, ratio=4.0, snapshots=(2.0,)),
        Training("smollm2-control", model=SMOLLM2, policy=None, ratio=4.0),
        Training(
            "smollm2-kvzap",
            model=SMOLLM2,
            policy=dms_jax.KVzap(window=WINDOW),
            ratio=4.0,
            budgets=(2.0, 8.0),
            trainable="adapter",
            make=scorer(recipes.kvzap),
        ),
        Training(
            "smollm2-kvpop",
            model=SMOLLM2,
            policy=dms_jax.KVpop(budget=128, window=WINDOW, prefill="evict_past_budget"),
            ratio=4.0,
            budgets=(2.0, 8.0),
            trainable="adapter",
            make=scorer(recipes.kvpop),
        ),
        Training(
            "smollm2-dmc",
            model=SMOLLM2,
            policy=dms_jax.DMC(),
            ratio=4.0,
            snapshots=(2.0,),
            trainable="all",
            make=functools.partial(merging, answers_only=False),  # texts have none
        ),
        Training("smollm2-low-rank-to-8", model=SMOLLM2, ratio=8.0),
        Training(
            "smollm2-adapter-to-8",
            model=SMOLLM2,
            ratio=8.0,
            snapshots=(2.0,),
            trainable="adapter",
        ),
        Training("smollm2-all-to-4", model=SMOLLM2, ratio=4.0, trainable="all"),
        Training("smollm2-all-to-8", model=SMOLLM2, ratio=8.0, snapshots=(2.0,), trainable="all"),
        CENTRE,
        *SWEEPS,
        Training(
            SHIPPED,
            model=SMOLLM2,
            ratio=4.0,
            trainable="adapter",
            ships="smollm2-135m-instruct-dms",
        ),
    )
}


def judged_first(config: Config) -> tuple[str, ...]:
    """The trainings of Qwen that a verdict may be about, the one others are compared with first."""
    return (config.judged,) if config.judged else (PLANNED, RIVAL)


# Setting of a method -> the training and its ratio that it is to hold as much as.
LIKE = {
    QWEN: {
        "2": (TO_4, "2"),
        "4": (TO_4, "4"),
        "8": ("low-rank-to-8", "8"),
    },
    SMOLLM2: {"2": ("smollm2-low-rank-w16", "2"), "8": ("smollm2-low-rank-to-8", "8")},
}


def reference(config: Config, model: str, setting: str = "") -> tuple[str, str]:
    """The retrofit that others are compared with at equal live tokens, and its ratio.

    Args:
      config: the plan.
      model: which model.
      setting: of the method that is compared.
    """
    training = TRAININGS[judged_first(config)[0] if model == QWEN else SHIPPED]
    return LIKE[model].get(setting, (training.name, f"{training.ratio:g}"))


@dataclasses.dataclass(frozen=True)
class Free:
    """A method that needs no training, or that asks a trained model in another way.

    Attributes:
      name: for files and tables.
      make: policy from the calibrated budget in tokens (a share of the length, where it has a
        ratio); None for one that has no budget.
      equal: what is as large as the reference's: its peak, or the mean of its live tokens.
      kv_dtype: of the cache.
      trained: whether the reference retrofit is asked, and not the model itself.
      times: the budget is so many times the calibrated one.
    """

    name: str
    make: Callable[..., Policy] | None = None
    equal: Literal["peak", "mean"] = "peak"
    kv_dtype: str | None = None
    trained: bool = False
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


# As the DMS paper ran them (appendix G.1), so that a prompt takes no more than the budget.
BY_TOKEN: Any = dict(prefill="evict_past_budget")
_TOVA = functools.partial(dms_jax.TOVA, **BY_TOKEN)
FREE = {
    free.name: free
    for free in (
        Free(VANILLA),
        Free("tova", _TOVA),
        Free("expected", _expected),
        Free("snapkv", _snapkv),
        Free("streaming", functools.partial(dms_jax.StreamingLLM, **BY_TOKEN)),
        Free("h2o", functools.partial(dms_jax.H2O, **BY_TOKEN)),
        Free("quest", dms_jax.Quest),
        Free("kcache", _kcache),
        Free("vanilla-float8", kv_dtype=FLOAT8),
        Free("dms-float8", trained=True, kv_dtype=FLOAT8, models=(QWEN,)),
        Free("tova-mean", _TOVA, equal="mean", models=(QWEN,)),
        Free("expected-mean", _expected, equal="mean", models=(QWEN,)),
        Free("streaming-mean", dms_jax.StreamingLLM, equal="mean", models=(QWEN,)),
        Free("tova-half-more", _TOVA, times=1.5, models=(QWEN,)),
        Free("expected-half-more", _expected, times=1.5, models=(QWEN,)),
    )
}
