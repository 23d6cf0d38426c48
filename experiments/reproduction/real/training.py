"""One retrofit of a model: what is learned, from what, and by which recipe."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import dms_jax
from dms_jax import recipes
from dms_jax.policies import Policy
from dms_jax.training import Recipe, Stage
from experiments.reproduction.real.settings import Config

QWEN, SMOLLM2 = "qwen", "smollm2"
WINDOW = 16
DMS = dms_jax.DMS(window=WINDOW, source="adapter")
SWEEP = "sweep-"  # begins the names of trainings that try a setting of the recipe
Lessons = Literal["all", "sampled", "cooler", "warmer", "greedy", "correct", "texts", "mixed"]


@dataclasses.dataclass(frozen=True)
class Training:
    """One retrofit; what it does not say is as `dms_jax.recipes.dms_self_taught` says.

    Attributes:
      name: for files and tables.
      model: which model.
      policy: what is learned; None for the control, which is trained further and evicts nothing.
      ratio: the nominal compression ratio at the end; of a scorer, which learns none, that of the
        retrofit that it is to hold as much as.
      snapshots: ratios on the way at which it is measured too.
      budgets: of a scorer, other ratios whose low-rank retrofit it is to hold as much as (`LIKE`).
      trainable: the adapter alone, low-rank updates too, or all weights.
      share: tokens, as a multiple of the plan's, or of a sweep's.
      make: the recipe, from its ratio and what else it can be told.
      words: what it changes, for tables.
      lessons: which answers it reads: all that the model ended, those at temperatures above 0, at
        the lowest or the highest of these, the greedy ones, those that were judged correct; texts
        in their place; or, mixed, texts and retrieval beside all of them.
      ships: the adapter that it is, one of this library or of `KEPT`; nothing is trained then.
      of: the training whose model it asks, with a policy of its own; nothing is trained then.
      asked: what it is asked, in place of all that is measured of its model.
    """

    name: str
    model: str = QWEN
    policy: Policy | None = DMS
    ratio: float = 3.5
    snapshots: tuple[float, ...] = ()
    budgets: tuple[float, ...] = ()
    trainable: Literal["adapter", "low_rank", "all"] = "low_rank"
    share: float = 1.0
    make: Callable[..., Recipe] = recipes.dms_self_taught
    words: str = ""
    lessons: Lessons = "all"
    ships: str = ""
    of: str = ""
    asked: tuple[str, ...] = ()

    @property
    def settings(self) -> tuple[float, ...]:
        """The ratios at which it is measured."""
        return (*self.snapshots, *self.budgets, self.ratio)

    @property
    def of_sweep(self) -> bool:
        """Whether it tries a setting of the recipe (`sweep.py`)."""
        return self.name.startswith(SWEEP)

    @property
    def adapter_only(self) -> bool:
        """Whether what is saved lies beside the weights."""
        return self.trainable != "all"

    @property
    def evicts_as_trained(self) -> bool:
        """Whether the ratio is learned; scorers of importance are fitted to it afterwards."""
        return isinstance(self.policy, dms_jax.DMS | dms_jax.DMC)

    def recipe(self, config: Config) -> Recipe:
        """Everything but model, policy and data."""
        recipe = dataclasses.replace(
            self._made(config),
            name=self.name,
            snapshots=self.snapshots,
            micro_batch_size=config.micro_batch_size,
        )
        return recipe if self.policy is not None else recipe.control(DMS)

    def to_dict(self, config: Config) -> dict[str, Any]:
        """For records: the policy as it is saved, and the recipe by its name."""
        made = {"make": self._made(config).name, "policy": self.policy and self.policy.to_dict()}
        return vars(self) | made

    def _made(self, config: Config) -> Recipe:
        tokens = config.tokens if self.model == QWEN else config.small_tokens
        tokens = config.sweep_tokens if self.of_sweep else tokens
        return self.make(
            self.ratio,
            trainable=self.trainable,
            tokens=round(self.share * tokens),
            sequence_length=config.sequence_length,
            batch_size=config.batch_size,
        )


def merging(
    ratio: float, *, trainable: Any, tokens: int, answers_only: bool = True, **sizes: Any
) -> Recipe:
    """DMC: a neuron is faded out first."""
    steps = max(10, round(tokens / (sizes["batch_size"] * sizes["sequence_length"])))
    decay, ramp = steps // 5, steps // 2
    return Recipe(
        name="dmc",
        stages=(
            Stage("neuron_decay", decay, 1e-4),
            Stage("ramp", ramp, 1e-4, ratio),
            Stage("train", steps - decay - ramp, 1e-4, final_learning_rate=1e-5),
        ),
        trainable=trainable,
        compression_weight=10.0,
        packing="first_fit",
        answers_only=answers_only,
        **sizes,
    )


def scorer(recipe: Callable[..., Recipe]) -> Callable[..., Recipe]:
    """A recipe of a scorer, which knows no ratio and trains nothing else."""
    return lambda ratio, trainable, **sizes: recipe(**sizes)
