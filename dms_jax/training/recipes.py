"""The published recipes as data, one for a laptop, and one for training from scratch.

A recipe is a list of stages and what stays the same over them. Change one with
`dataclasses.replace(recipe, batch_size=16)`. The window, the source of decisions and the
temperature belong to the policy, not to the recipe.

Sources: NVIDIA's released training code (adapters on a frozen Qwen3); the paper's text and its
tables 2 to 4 (all weights, a borrowed neuron); the DMC paper; measured recipes for the
260K-parameter model that ships with this library.
"""

import dataclasses
import math
from typing import Annotated, Literal

from dms_jax.checks import Count, Number, Range, Whole, check, require
from dms_jax.training.recipe import Loss, Recipe, Stage


def _ramp_steps(compression_ratio: Number, steps_per_ratio: int) -> int:
    above_one = Annotated[Number, Range(1, above=True)]
    compression_ratio = check("recipes: compression_ratio", compression_ratio, above_one)
    steps_per_ratio = check("recipes: steps_per_ratio", steps_per_ratio, Count)
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
        distillation_positions="inputs",
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
    "qwen-r1-7b": _PaperRow(8192, 1e-6, ((4, 3000, 1e-6), (8, 3000, 2e-5))),
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
    require(
        model in _PAPER,
        f"recipes: the paper has no model {model!r}; there are {', '.join(sorted(_PAPER))}",
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
        f"{compression_ratio:g}",
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


@dataclasses.dataclass(frozen=True)
class _DmcRow:
    """How one model was retrofitted with DMC."""

    decay_steps: int
    decay_learning_rate: Number
    learning_rate: Number  # ten times what it falls to in the end
    loss: Loss


_DMC_PAPER = {
    "llama-2-7b": _DmcRow(250, 3e-5, 3e-5, "language_modeling"),
    "llama-2-13b": _DmcRow(250, 3e-5, 3e-5, "language_modeling"),
    "llama-2-70b": _DmcRow(250, 1.5e-5, 1.5e-5, "language_modeling"),
    # From the DMS paper, table 3, where DMC is a baseline.
    "llama-2-7b-dms-paper": _DmcRow(2000, 3e-5, 3e-5, "language_modeling"),
    "llama-3.2-1b": _DmcRow(2000, 1e-6, 1e-5, "distillation"),
}


def dmc_paper(
    compression_ratio: Number = 2.0,
    *,
    model: str = "llama-2-7b",
    variant: Literal["dmc", "dmc-c", "local_prior", "immediate"] = "dmc",
    steps_per_ratio: int = 6000,
) -> Recipe:
    """The recipe of the DMC paper: neuron decay, a slow ramp, 2000 steps to solidify.

    Args:
      compression_ratio: to reach; the paper went to 2, 3 and 4 (to 2 with 70B).
      model: llama-2-7b, llama-2-13b or llama-2-70b; llama-2-7b-dms-paper or llama-3.2-1b for
        DMC as a baseline of the DMS paper.
      variant: of the paper's ablations: "dmc-c" keeps the heads of a layer alike (the weight of
        that loss is ours, 1), "local_prior" sets the target for each layer, "immediate" for every
        step instead of a ramp (from the second step on). DMC-HardC and uniform weighting are
        options of the policy, fixed memory pooling is a policy.
      steps_per_ratio: 6000 of 4M tokens a unit; the paper's short regime has 3000.

    Raises:
      ConfigError: there is no such model or variant.
    """
    require(
        model in _DMC_PAPER,
        f"recipes: the paper has no model {model!r}; there are {', '.join(sorted(_DMC_PAPER))}",
    )
    variants = ("dmc", "dmc-c", "local_prior", "immediate")
    require(variant in variants, f"recipes: variant must be one of {variants}, got {variant!r}")
    row = _DMC_PAPER[model]
    rate, steps = row.learning_rate, _ramp_steps(compression_ratio, steps_per_ratio)
    if variant == "immediate":
        ramp = (Stage("ramp", 1, rate, compression_ratio), Stage("train", max(1, steps - 1), rate))
    else:
        ramp = (Stage("ramp", steps, rate, compression_ratio),)
    return Recipe(
        name=f"dmc_paper {model} {variant}",
        stages=(
            Stage("neuron_decay", row.decay_steps, row.decay_learning_rate),
            *ramp,
            Stage("train", 2000, rate, final_learning_rate=rate / 10),
        ),
        sequence_length=4096,
        batch_size=1024,
        micro_batch_size=1,
        trainable="all",
        loss=row.loss,
        weight_decay=0.1,
        prior="layer" if variant == "local_prior" else "global",
        head_balance=1.0 if variant == "dmc-c" else 0.0,
    )


def dmc_quickstart(
    compression_ratio: Number = 2.0,
    *,
    steps_per_ratio: int = 80,
    snapshots: tuple[Number, ...] = (),
) -> Recipe:
    """DMC on the 260K-parameter model of the demo: all weights, some hundred short steps.

    For `DMC(neuron="first", offset=2.0, temperature=0.3)`: the paper's constant of 5 and
    temperature of 0.1 take thousands of steps to be overcome. The neuron is an eighth of that
    model's head, so that its loss costs more than the merging
    (`experiments/reproduction/dmc_stories.py`).
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
        remat=False,
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
    """Trains a small model from scratch: warm-up, the peak rate, half a cosine down to nothing.

    Args:
      steps: optimizer steps.
      learning_rate: peak, of all weights.
      warmup_steps: of the rate; no more than a tenth of the steps are taken.
      decay_share: share of the steps over which the rate falls; what it leaves is spent at the
        peak.
      sequence_length: T.
      batch_size: sequences a step.

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
        remat=False,
        unroll=True,
        packing="first_fit",
    )
