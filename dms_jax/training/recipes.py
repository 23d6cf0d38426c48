"""The published recipes, recipes for a laptop, and one for training from scratch.

A recipe is a list of stages and the settings that they share. Change one with
`dataclasses.replace(recipe, batch_size=16)`. The window, the source of decisions and the
temperature belong to the policy, not to the recipe.

Sources: NVIDIA's released training code (adapters on a frozen Qwen3); the DMS paper's text and its
tables 2 to 4 (all weights, a borrowed neuron); the DMC paper; and our measurements for the
260K-parameter model that ships with this library.
"""

import dataclasses
import math
from typing import Annotated, Any

from dms_jax.checks import Count, Number, Range, Whole, check, require
from dms_jax.errors import ConfigError
from dms_jax.policies import Policy
from dms_jax.training.parameters import Trained
from dms_jax.training.recipe import Loss, Recipe, Stage


def _ramp_steps(compression_ratio: Number, steps_per_ratio: int) -> int:
    above_one = Annotated[Number, Range(1, above=True)]
    compression_ratio = check("recipes: compression_ratio", compression_ratio, above_one)
    steps_per_ratio = check("recipes: steps_per_ratio", steps_per_ratio, Count)
    return max(1, round((compression_ratio - 1) * steps_per_ratio))


def _steps_of(name: str, tokens: int, batch_size: int, sequence_length: int) -> int:
    """Returns the number of steps for `tokens` tokens, at least 1."""
    given = dict(tokens=tokens, batch_size=batch_size, sequence_length=sequence_length)
    for option, value in given.items():
        check(f"{name}: {option}", value, Count)
    return max(1, round(tokens / (batch_size * sequence_length)))


def recommended(policy: Policy, positions: int) -> Recipe:
    """Returns the default recipe of `retrofit`.

    NVIDIA's released recipe for DMS (to ratio 8), the paper's for DMC (to 2), and ours for the
    scorers of KVzap and KVpop, with sequences cut to the model's positions.

    Args:
      policy: a trainable policy.
      positions: positions of the model.

    Raises:
      ConfigError: no recipe was made for the policy.
    """
    if policy.name not in _MADE_FOR:
        raise ConfigError(
            f"No recipe was made for {policy.name}, only for {', '.join(_MADE_FOR)}: give recipe=."
        )
    recipe = _MADE_FOR[policy.name]()
    length = min(recipe.sequence_length, positions)
    return dataclasses.replace(recipe, sequence_length=length)


def dms_published(compression_ratio: Number = 8.0) -> Recipe:
    """NVIDIA's released recipe: adapters on a frozen model, 34 steps per unit of compression ratio.

    Qwen3-8B takes about 250 steps of 8 sequences of 32768 tokens to reach ratio 8. For a policy
    that borrows a neuron, all weights are trained instead, after the paper's 2000 steps of decay.
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
        distillation_positions="inputs",
        ignore_end_token=True,
    )


@dataclasses.dataclass(frozen=True)
class _PaperRow:
    """A row of tables 2 and 3 of the DMS paper: how one model was retrofitted."""

    sequence_length: int
    decay_learning_rate: Number
    ramps: tuple[tuple[Number, int, Number], ...]  # final ratio, steps per unit, learning rate
    ramp_batch_size: int = 1024
    loss: Loss = "distillation"


_PAPER = {
    # The recipe of the paper's text; the tables give its learning rates.
    "text": _PaperRow(4096, 1e-6, ((math.inf, 100, 1e-5),)),
    "llama-3.2-1b": _PaperRow(4096, 1e-6, ((math.inf, 3000, 1e-5),)),
    "llama-2-7b": _PaperRow(4096, 3e-5, ((math.inf, 3000, 3e-5),), loss="language_modeling"),
    "llama-3.1-8b": _PaperRow(8192, 3e-5, ((math.inf, 2000, 3e-5),), loss="language_modeling"),
    "qwen-r1-1.5b": _PaperRow(8192, 1e-5, ((4, 3000, 1e-5), (8, 3000, 1e-5))),
    "qwen-r1-7b": _PaperRow(8192, 1e-6, ((4, 3000, 1e-6), (8, 3000, 2e-5))),
    "qwen-r1-32b": _PaperRow(8192, 1e-6, ((4, 4000, 1e-5),), ramp_batch_size=256),
}


def dms_paper(compression_ratio: Number = 4.0, *, model: str = "text") -> Recipe:
    """The DMS paper's recipe: all weights, 2000 steps of neuron decay, then the ramp.

    Args:
      compression_ratio: compression ratio to reach.
      model: "text" for the 100 steps per unit of the paper's text, or a row of its tables:
        llama-3.2-1b, llama-2-7b, llama-3.1-8b, qwen-r1-1.5b, qwen-r1-7b, qwen-r1-32b.

    Raises:
      ConfigError: the row is unknown, or does not reach this ratio.
    """
    require(
        model in _PAPER,
        f"recipes: the paper has no model {model!r}; there are {', '.join(sorted(_PAPER))}.",
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
    require(
        reached == compression_ratio,
        f"recipes: the paper takes {model} to a compression ratio of {reached:g}, not "
        f"{compression_ratio:g}.",
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
    """DMS on the 260K-parameter model of the demo, on a laptop: all weights and the adapter.

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
        remat="nothing",
        snapshots=snapshots,
    )


_SELF_TAUGHT_RATES = {"adapter": 3e-5, "low_rank": 2e-4, "all": 1e-5}


def dms_self_taught(
    compression_ratio: Number = 3.5,
    *,
    trainable: Trained = "low_rank",
    tokens: int = 610 * 32768,
    learning_rate: Number | None = None,
    adapter_learning_rate: Number = 3e-4,
    sequence_length: int = 2048,
    batch_size: int = 16,
    settle: Number = 0.5,
) -> Recipe:
    """DMS for a small model on its own answers, on one GPU, for `DMS(window=16)`.

    The defaults come from Qwen2.5-Coder-0.5B-Instruct (`experiments/results/real_models`): sampled
    answers packed by first fit, 610 steps of 32,768 tokens in four minutes of an H200. Nine runs of
    this recipe and its variants, to a ratio of 3.3 or 3.5, hold 3.1 times fewer tokens and solve
    1.8 +- 0.8 points of GSM8K less than the original model, which itself solves 2.2 +- 1.1 less
    after training on the same number of tokens without eviction.

    Args:
      compression_ratio: compression ratio to reach.
      trainable: "adapter" for the adapter alone, "low_rank" for the adapter and low-rank updates of
        the attention projections (rank: `low_rank` of the recipe), "all" for all weights.
      tokens: tokens of the whole run, padding included.
      learning_rate: learning rate of all other parameters; None for 2e-4 with low-rank updates and
        1e-5 with all weights.
      adapter_learning_rate: of the adapter.
      sequence_length: T, tokens per packed sequence.
      batch_size: sequences per step.
      settle: share of the steps, at the end, that keep the ratio while the learning rates fall to
        zero. The rates rise over the first tenth of the other steps (`warmed` changes that).

    Raises:
      ConfigError: a number is out of range.
    """
    trainable = check("dms_self_taught: trainable", trainable, Trained)
    _ramp_steps(compression_ratio, 1)
    rate = _SELF_TAUGHT_RATES[trainable] if learning_rate is None else learning_rate
    steps = _steps_of("dms_self_taught", tokens, batch_size, sequence_length)
    ramp = Stage(
        "ramp", steps, rate, compression_ratio, adapter_learning_rate=adapter_learning_rate
    )
    recipe = Recipe(
        name="dms_self_taught",
        stages=(ramp,),
        sequence_length=sequence_length,
        batch_size=batch_size,
        micro_batch_size=math.gcd(batch_size, 8),
        trainable=trainable,
        packing="first_fit",
    )
    return recipe.settled(settle).warmed(0.1)


def dms_warm_up(compression_ratio: Number = 3.5, *, share: float = 0.2, **options: Any) -> Recipe:
    """`dms_self_taught`, after the adapter has learned from attention which tokens matter least.

    Args:
      compression_ratio: compression ratio to reach.
      share: share of the steps, at the start, in which only the adapter learns, from attention.
      **options: as for `dms_self_taught`; `tokens` counts both parts.

    Raises:
      ConfigError: a number is out of range, or there is only one step.
    """
    return attention_first(dms_self_taught(compression_ratio, **options), share)


def attention_first(recipe: Recipe, share: float) -> Recipe:
    """Returns a recipe of `dms_self_taught` that starts like `dms_warm_up`.

    Raises:
      ConfigError: `share` is not in (0, 1], or the recipe's ramp has one step.
    """
    share = check("dms_warm_up: share", share, Annotated[float, Range(0, 1, above=True)])
    ramp, *rest = recipe.stages
    total = sum(stage.steps for stage in recipe.stages)
    steps = min(max(1, round(share * total)), ramp.steps - 1)
    require(steps > 0, "dms_warm_up: the ramp has one step; raise tokens.")
    rate, left = ramp.adapter_learning_rate, ramp.steps - steps
    assert rate is not None
    stages = (
        Stage("supervise", steps, rate, final_learning_rate=0.0),
        dataclasses.replace(ramp, steps=left, warmup_steps=min(ramp.warmup_steps, left)),
        *rest,
    )
    return dataclasses.replace(recipe, name="dms_warm_up", stages=stages)


@dataclasses.dataclass(frozen=True)
class _DmcRow:
    """How one model was retrofitted with DMC."""

    decay_steps: int
    decay_learning_rate: Number
    learning_rate: Number  # ten times the final one
    loss: Loss
    highest: Number = math.inf  # compression ratio


_DMC_PAPER = {
    "llama-2-7b": _DmcRow(250, 3e-5, 3e-5, "language_modeling", 4),
    "llama-2-13b": _DmcRow(250, 3e-5, 3e-5, "language_modeling", 4),
    "llama-2-70b": _DmcRow(250, 1.5e-5, 1.5e-5, "language_modeling", 2),
    # From the DMS paper, table 3 (DMC as a baseline), by units of ratio.
    "llama-2-7b-dms-paper": _DmcRow(2000, 3e-5, 3e-5, "language_modeling"),
    "llama-3.2-1b": _DmcRow(2000, 1e-6, 1e-5, "distillation"),
}


def dmc_paper(
    compression_ratio: Number = 2.0,
    *,
    model: str = "llama-2-7b",
    steps_per_ratio: int = 6000,
) -> Recipe:
    """The DMC paper's recipe: neuron decay, a slow ramp, solidification for 2000 steps.

    Args:
      compression_ratio: compression ratio to reach; the DMC paper goes up to 4, and to 2 with 70B.
      model: llama-2-7b, llama-2-13b or llama-2-70b; llama-2-7b-dms-paper or llama-3.2-1b for
        DMC as a baseline of the DMS paper.
      steps_per_ratio: steps of 4M tokens per unit of compression ratio; 3000 in the paper's short
        regime.

    Raises:
      ConfigError: the model is unknown, or the paper does not reach the ratio with it.
    """
    require(
        model in _DMC_PAPER,
        f"recipes: the paper has no model {model!r}; there are {', '.join(sorted(_DMC_PAPER))}.",
    )
    row = _DMC_PAPER[model]
    _ramp_steps(compression_ratio, 1)
    require(
        compression_ratio <= row.highest,
        f"recipes: the paper takes {model} to a compression ratio of at most {row.highest:g}, not "
        f"{compression_ratio:g}.",
    )
    rate, steps = row.learning_rate, _ramp_steps(compression_ratio, steps_per_ratio)
    return Recipe(
        name=f"dmc_paper {model}",
        stages=(
            Stage("neuron_decay", row.decay_steps, row.decay_learning_rate),
            Stage("ramp", steps, rate, compression_ratio),
            Stage("train", 2000, rate, final_learning_rate=rate / 10),
        ),
        sequence_length=4096,
        batch_size=1024,
        micro_batch_size=1,
        trainable="all",
        loss=row.loss,
        weight_decay=0.1,
    )


def dmc_quickstart(
    compression_ratio: Number = 2.0,
    *,
    steps_per_ratio: int = 80,
    snapshots: tuple[Number, ...] = (),
) -> Recipe:
    """DMC on the 260K-parameter model of the demo: all weights, a few hundred short steps.

    Made for `DMC(neuron="first", offset=2.0, temperature=0.3)`: with the paper's offset of 5 and
    temperature of 0.1, decisions change only after thousands of steps. The neuron is an eighth of
    that model's head dimension, so losing it costs more than the partial accumulation.
    """
    steps = _ramp_steps(compression_ratio, steps_per_ratio)
    return Recipe(
        name="dmc_quickstart",
        stages=(
            Stage("neuron_decay", 100, 5e-4),
            Stage("ramp", steps, 7e-4, compression_ratio),
            Stage("train", 120, 7e-4, final_learning_rate=7e-5),
        ),
        sequence_length=512,
        batch_size=4,
        trainable="all",
        compute_dtype=None,
        remat="nothing",
        compression_weight=2.0,
        snapshots=snapshots,
    )


def pretraining(
    steps: int,
    *,
    learning_rate: Number = 3e-3,
    warmup_steps: int = 300,
    decay_share: Number = 1.0,
    sequence_length: int = 2048,
    batch_size: int = 64,
) -> Recipe:
    """Training a small model from scratch: warm-up, peak rate, half-cosine decay to zero.

    Args:
      steps: optimizer steps.
      learning_rate: peak learning rate of all weights.
      warmup_steps: steps of warm-up, capped at a tenth of all steps.
      decay_share: share of the steps over which the rate falls; between warm-up and decay it stays
        at the peak.
      sequence_length: T, tokens per training sequence.
      batch_size: sequences per step.

    Raises:
      ConfigError: a number is out of range.
    """
    steps = check("pretraining: steps", steps, Count)
    warmup_steps = check("pretraining: warmup_steps", warmup_steps, Whole)
    above_nothing = Annotated[float, Range(0, 1, above=True)]
    decay_share = check("pretraining: decay_share", decay_share, above_nothing)
    warmup = min(warmup_steps, steps // 10)
    held = steps - max(1, round(decay_share * steps))
    if held <= warmup:
        stages = (Stage("train", steps, learning_rate, warmup_steps=warmup, final_learning_rate=0),)
    else:
        stages = (
            Stage("train", held, learning_rate, warmup_steps=warmup),
            Stage("train", steps - held, learning_rate, final_learning_rate=0),
        )
    return Recipe(
        name="pretraining",
        stages=stages,
        sequence_length=sequence_length,
        batch_size=batch_size,
        trainable="all",
        loss="language_modeling",
        weight_decay=0.1,
        remat="nothing",
        unroll=True,
        packing="first_fit",
    )


def kvzap(
    *,
    tokens: int = 238 * 65536,
    learning_rate: Number = 1e-3,
    sequence_length: int = 2048,
    batch_size: int = 32,
) -> Recipe:
    """A scorer for `KVzap`, regressed on the importance that attention gives; frozen weights.

    Afterwards `dms_jax.calibrate` sets the threshold for a compression ratio. The rate and the
    number of tokens are our choice; the publication trains on 1.2M tokens of about 2,400 texts,
    several times each.

    Args:
      tokens: tokens of the whole run, padding included.
      learning_rate: learning rate of the scorer, which decays to zero along a half-cosine.
      sequence_length: T, tokens per packed sequence; the scorer learns from the attention of tokens
        beyond the window.
      batch_size: sequences per step.

    Raises:
      ConfigError: a number is out of range.
    """
    return _scorer("kvzap", tokens, learning_rate, sequence_length, batch_size)


def kvpop(
    *,
    tokens: int = 238 * 65536,
    learning_rate: Number = 1e-3,
    sequence_length: int = 2048,
    batch_size: int = 32,
) -> Recipe:
    """A scorer for `KVpop`, regressed on the mean attention of later queries; frozen weights.

    The publication trains all weights on 2B tokens.

    Args:
      tokens, learning_rate, sequence_length, batch_size: as for `kvzap`.

    Raises:
      ConfigError: a number is out of range.
    """
    return _scorer("kvpop", tokens, learning_rate, sequence_length, batch_size)


def _scorer(
    name: str, tokens: int, learning_rate: Number, sequence_length: int, batch_size: int
) -> Recipe:
    steps = _steps_of(name, tokens, batch_size, sequence_length)
    stage = Stage(
        "supervise",
        steps,
        learning_rate,
        warmup_steps=min(10, steps // 10),
        final_learning_rate=0.0,
    )
    return Recipe(
        name=name,
        stages=(stage,),
        sequence_length=sequence_length,
        batch_size=batch_size,
        micro_batch_size=math.gcd(batch_size, 8),
        trainable="adapter",
        loss="language_modeling",
        packing="first_fit",
    )


_MADE_FOR = {"DMS": dms_published, "DMC": dmc_paper, "KVzap": kvzap, "KVpop": kvpop}
