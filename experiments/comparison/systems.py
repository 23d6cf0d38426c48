"""Who is compared at a compression ratio, and what each learned on the same tokens.

A budget is tokens / ratio. Systems that read or fetch less than they keep take that for what a
query head reads; a learned one aims at the ratio, and what it reaches is measured.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import dms_jax
from dms_jax.policies import POLICIES, Policy
from dms_jax.policies.scored import Scorer
from dms_jax.training import Recipe, Stage

# A system that cuts rows every so often does so once every so many tokens here.
INTERVAL = 16


@dataclasses.dataclass(frozen=True)
class System:
    """One row of the comparison.

    Attributes:
      label: for the table.
      ratio: nominal; 1 for what does not compress.
      model: what runs; of a learned system its own.
      policy: how its cache is kept.
      kv_dtype: of the cache; None for the model's.
    """

    label: str
    ratio: float
    model: dms_jax.LanguageModel
    policy: Policy
    kv_dtype: str | None = None


def training_free(model: dms_jax.LanguageModel, ratio: float, tokens: int) -> Iterator[System]:
    """Every system that needs no training, with a budget of tokens / ratio.

    One that cannot work with so few tokens is left out.
    """
    budget = max(int(tokens / ratio), 1)
    recent = budget // 2
    options: dict[str, dict[str, Any]] = {
        "StreamingLLM": dict(budget=budget),
        "RandomEviction": dict(window=recent, rate=(tokens - budget) / (tokens - recent)),
        "Quest": dict(budget=budget),
        "KCache": dict(top=budget),
    }
    if ratio == int(ratio):
        options["FixedPooling"] = dict(every=int(ratio))  # as it is: nothing was trained for it
    for name, kind in POLICIES.items():
        if kind.learned or name == "Vanilla":
            continue
        if issubclass(kind, Scorer):
            options[name] = dict(budget=budget, interval=INTERVAL)
            if name == "SnapKV":
                options[name]["window"] = min(32, max(budget // 2, 1))
        elif name not in options and "budget" in {f.name for f in dataclasses.fields(kind)}:
            options[name] = dict(budget=budget)
    for name, fields in options.items():
        if name in POLICIES:
            yield System(name, ratio, model, POLICIES[name](**fields))
    scorer = dms_jax.SnapKV(**options["SnapKV"])
    yield System("AdaKV", ratio, model, dms_jax.AdaKV(scorer=scorer))
    yield System("PyramidKV", ratio, model, dms_jax.PyramidKV(scorer=scorer))


def combined(learned: System, tokens: int) -> Iterator[System]:
    """What reads less of, or stores in fewer bits, what a learned system kept."""
    budget = max(int(tokens / learned.ratio / 2), 16)
    over = learned.policy
    quest = dms_jax.Quest(budget=budget, over=over)
    yield dataclasses.replace(learned, label=f"{learned.label} + Quest", policy=quest)
    kcache = dms_jax.KCache(top=budget, over=over)
    yield dataclasses.replace(learned, label=f"{learned.label} + KCache", policy=kcache)
    yield dataclasses.replace(learned, label=f"{learned.label} + float8", kv_dtype="float8_e4m3")


@dataclasses.dataclass(frozen=True)
class Lessons:
    """How the learned systems are trained: the same tokens for all, in the same order.

    Attributes:
      data: documents.
      steps: optimizer steps.
      batch_size, sequence_length: of a step.
      seed: of order and noise.
    """

    data: Any
    steps: int = 120
    batch_size: int = 4
    sequence_length: int = 512
    seed: int = 0

    @property
    def tokens(self) -> int:
        """That each system sees."""
        return self.steps * self.batch_size * self.sequence_length

    def recipe(self, stages: tuple[Stage, ...], **options: Any) -> Recipe:
        """A recipe of these sizes."""
        return Recipe(
            name="compare_policies",
            stages=stages,
            sequence_length=self.sequence_length,
            batch_size=self.batch_size,
            trainable="all",
            compute_dtype=None,
            remat=False,
            **options,
        )


def sparsified(
    model: dms_jax.LanguageModel,
    policy: dms_jax.DMS,
    ratios: tuple[float, ...],
    lessons: Lessons,
    tell: Callable[[str], None],
) -> Iterator[System]:
    """DMS at every ratio, out of one run that ramps through them."""
    last = float(max(ratios))
    stage = Stage("ramp", lessons.steps, 1e-4, last, adapter_learning_rate=3e-4)
    reached: dict[float, dms_jax.LanguageModel] = {}
    tell(f"DMS learns from {lessons.tokens:,} tokens")
    reached[last] = dms_jax.retrofit(
        model,
        policy,
        recipe=lessons.recipe((stage,), snapshots=tuple(sorted(ratios)[:-1])),
        data=lessons.data,
        seed=lessons.seed,
        on_snapshot=reached.__setitem__,
        progress=False,
    )
    for ratio, one in sorted(reached.items()):
        yield System("DMS", ratio, one, one.policy)


def merged(
    model: dms_jax.LanguageModel, ratio: float, lessons: Lessons, tell: Callable[[str], None]
) -> Iterator[System]:
    """DMC at a ratio: a third of the steps for the decay, a quarter upwards, the rest to settle.

    The constants are those of `dms_jax.recipes.dmc_quickstart`.
    """
    policy = dms_jax.DMC(neuron="first", offset=2.0, temperature=0.3)
    decay, ramp = lessons.steps // 3, lessons.steps // 4
    stages = (
        Stage("neuron_decay", decay, 5e-4),
        Stage("ramp", ramp, 7e-4, ratio),
        Stage("train", lessons.steps - decay - ramp, 7e-4, final_learning_rate=7e-5),
    )
    tell(f"DMC at {ratio:g} learns from {lessons.tokens:,} tokens")
    trained = dms_jax.retrofit(
        model,
        policy,
        recipe=lessons.recipe(stages, compression_weight=2.0),
        data=lessons.data,
        seed=lessons.seed,
        progress=False,
    )
    yield System("DMC", ratio, trained, trained.policy)


def grouped(
    model: dms_jax.LanguageModel,
    ratio: float,
    lessons: Lessons,
    tell: Callable[[str], None],
) -> Iterator[System]:
    """The model with fewer KV heads, uptrained; nothing where they do not divide."""
    heads = model.config.num_kv_heads / ratio
    if heads != int(heads) or not 1 <= heads < model.config.num_kv_heads:
        return
    tell(f"GQA with {int(heads)} KV heads learns from {lessons.tokens:,} tokens")
    stage = Stage("train", lessons.steps, 1e-3, final_learning_rate=0.0)
    trained = dms_jax.train(
        dms_jax.to_grouped_query(model, int(heads)),
        recipe=lessons.recipe((stage,), loss="language_modeling"),
        data=lessons.data,
        seed=lessons.seed,
        progress=False,
    )
    yield System("GQA", ratio, trained, trained.policy)
