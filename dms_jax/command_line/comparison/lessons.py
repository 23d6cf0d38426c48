"""What the learned systems are trained on, and how: the same tokens for all, in the same order."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax

import dms_jax
from dms_jax.command_line.comparison.systems import System, learned
from dms_jax.data.mixture import Mixture
from dms_jax.training import Recipe, Stage

NEVER = 1e6  # an offset that no neuron reaches


@dataclasses.dataclass(frozen=True)
class Lessons:
    """The tokens of every learned system, and the rates at which it learns from them.

    Attributes:
      data: documents, or a mixture, which is made while training runs.
      steps: optimizer steps.
      batch_size, sequence_length: of a step.
      learning_rate, adapter_learning_rate: of DMS.
      dmc_learning_rate: of DMC, while it merges; it fades its neuron out at 5/7 of that.
      dmc_neuron, dmc_offset, dmc_temperature: of DMC.
      dmc_weight: of the loss that makes it merge, beside that of distillation.
      gqa_learning_rate: of uptraining, at its start.
      weight_decay: of all.
      seed: of order and noise.
      workers: processes that make a mixture.
      save: folder for what was learned, a checkpoint each; None for none.
    """

    data: Any
    steps: int = 120
    batch_size: int = 4
    sequence_length: int = 512
    learning_rate: float = 1e-4
    adapter_learning_rate: float = 3e-4
    dmc_learning_rate: float = 7e-4
    dmc_neuron: Literal["first", "last"] = "first"
    dmc_offset: float = 2.0
    dmc_temperature: float = 0.3
    dmc_weight: float = 2.0
    gqa_learning_rate: float = 1e-3
    weight_decay: float = 0.0
    seed: int = 0
    workers: int = 2
    save: pathlib.Path | None = None

    @property
    def tokens(self) -> int:
        """That each system sees."""
        return self.steps * self.batch_size * self.sequence_length

    def recipe(
        self, model: dms_jax.LanguageModel, stages: tuple[Stage, ...], **options: Any
    ) -> Recipe:
        """A recipe of these sizes."""
        return Recipe(
            name="compare_policies",
            stages=stages,
            sequence_length=self.sequence_length,
            batch_size=self.batch_size,
            trainable="all",
            weight_decay=self.weight_decay,
            compute_dtype="bfloat16" if model.dtype == "bfloat16" else None,
            remat="nothing",
            unroll=jax.default_backend() != "cpu",
            **options,
        )

    def finished(self, label: str, ratio: float, model: dms_jax.LanguageModel) -> System:
        """A system that has learned, written to disk where that is asked for."""
        if self.save is not None:
            dms_jax.save(model, model.policy, self.save / f"{label}@{ratio:g}".replace(" ", ""))
        return learned(label, ratio, model)

    @contextlib.contextmanager
    def open(self) -> Iterator[Any]:
        """The data from its beginning."""
        if not isinstance(self.data, Mixture):
            yield self.data
            return
        batches = self.data.batches(workers=self.workers)
        try:
            yield batches
        finally:
            batches.close()


def sparsified(
    base: System,
    policy: dms_jax.DMS,
    ratios: tuple[float, ...],
    lessons: Lessons,
    tell: Callable[[str], None],
) -> Iterator[System]:
    """DMS at every ratio beyond that of `base`, out of one run that ramps through them."""
    label = _label(base, "DMS")
    aims = {ratio: ratio / base.ratio for ratio in ratios if ratio > base.ratio}
    if not aims:
        return
    *before, last = sorted(aims.values())
    adapter = lessons.adapter_learning_rate
    stage = Stage("ramp", lessons.steps, lessons.learning_rate, last, adapter_learning_rate=adapter)
    reached: dict[float, dms_jax.LanguageModel] = {}
    tell(f"{label} learns from {lessons.tokens:,} tokens")
    with lessons.open() as data:
        reached[last] = dms_jax.retrofit(
            base.model,
            policy,
            recipe=lessons.recipe(base.model, (stage,), snapshots=tuple(before)),
            data=data,
            seed=lessons.seed,
            on_snapshot=reached.__setitem__,
            progress=False,
        )
    for ratio, aim in aims.items():
        yield lessons.finished(label, ratio, reached[aim])


def merged(
    base: System, ratio: float, lessons: Lessons, tell: Callable[[str], None]
) -> Iterator[System]:
    """DMC at a ratio: a third of the steps for the decay, a quarter upwards, the rest to settle.

    Its weights with nothing merged tell what the training and the lost neuron cost by themselves.
    Nothing where `base` is at that ratio by itself.
    """
    if ratio <= base.ratio:
        return
    policy = dms_jax.DMC(
        neuron=lessons.dmc_neuron,
        offset=lessons.dmc_offset,
        temperature=lessons.dmc_temperature,
    )
    label = _label(base, "DMC")
    decay, ramp = lessons.steps // 3, lessons.steps // 4
    rate = lessons.dmc_learning_rate
    stages = (
        Stage("neuron_decay", decay, 5 * rate / 7),
        Stage("ramp", ramp, rate, ratio / base.ratio),
        Stage("train", lessons.steps - decay - ramp, rate, final_learning_rate=rate / 10),
    )
    tell(f"{label} at {ratio:g} learns from {lessons.tokens:,} tokens")
    with lessons.open() as data:
        trained = dms_jax.retrofit(
            base.model,
            policy,
            recipe=lessons.recipe(base.model, stages, compression_weight=lessons.dmc_weight),
            data=data,
            seed=lessons.seed,
            progress=False,
        )
    yield lessons.finished(label, ratio, trained)
    never = dataclasses.replace(policy, offset=NEVER)
    yield System(f"{label}, nothing merged", ratio, trained, lambda share: never)


def grouped(
    base: System,
    ratio: float,
    lessons: Lessons,
    tell: Callable[[str], None],
) -> Iterator[System]:
    """The model with fewer KV heads, uptrained; nothing where they do not divide."""
    model = base.model
    heads = model.config.num_kv_heads / ratio
    if heads != int(heads) or not 1 <= heads < model.config.num_kv_heads:
        tell(f"GQA at {ratio:g} is left out: {model.config.num_kv_heads} KV heads do not divide")
        return
    tell(f"GQA with {int(heads)} KV heads learns from {lessons.tokens:,} tokens")
    stage = Stage("train", lessons.steps, lessons.gqa_learning_rate, final_learning_rate=0.0)
    with lessons.open() as data:
        trained = dms_jax.train(
            dms_jax.to_grouped_query(model, int(heads)),
            recipe=lessons.recipe(model, (stage,), loss="language_modeling"),
            data=data,
            seed=lessons.seed,
            progress=False,
        )
    yield lessons.finished("GQA", ratio, trained)


def _label(base: System, name: str) -> str:
    return name if base.ratio == 1 else f"{base.label} + {name}"
