"""The jobs, and where their files are.

lessons/MODEL/SHARD.jsonl             sampled answers; SHARD/ is the journal of it
trainings/NAME/                       a run directory of `dms_jax.train`: log, snapshots, model
summaries/NAME.json                   the thinned log of a training that is done
results/MODEL/SYSTEM/MEASURE.json     figures of one system; answers/ beside it is its journal
jobs/, locks/, failed/                see `experiments.reproduction.queue`
"""

import dataclasses
import fnmatch
import pathlib
from collections.abc import Iterator
from typing import Literal

import dms_jax
from dms_jax import assets
from experiments.reproduction.queue import Places
from experiments.reproduction.real.settings import Config
from experiments.reproduction.real.systems import (
    CONTROL,
    FREE,
    FRONTIER,
    FRONTIERS,
    HALF,
    KEPT,
    LIKE,
    MEASURES,
    OTHERS,
    PLANNED,
    TO_4,
    TRAININGS,
    UNSEEN,
    VANILLA,
    judged_first,
    reference,
)
from experiments.reproduction.real.training import QWEN, SMOLLM2, Training

SPEED = "speed"
_FREE_ELSEWHERE = (
    *("tova", "expected", "streaming", "snapkv", "h2o", "quest", "kcache"),
    "vanilla-float8",
)
_BUDGETED = tuple(name for name in _FREE_ELSEWHERE if FREE[name].make)
_AT_THE_PEAK = ("expected", "tova", "h2o", "streaming")  # the best of them is in a verdict
_OF_THE_TABLE = ("snapkv", "quest", "kcache", "vanilla-float8", "dms-float8")  # and so in one run
# What is asked other tasks beside what is judged.
_ELSEWHERE = (
    *(TO_4, "kvzap", "kvpop", "dmc"),
    *("adapter-to-4", "all-to-4", "low-rank-to-8", "adapter-to-8", "all-to-8"),
)


@dataclasses.dataclass(frozen=True)
class Job:
    """A piece of work for one process.

    Attributes:
      kind: what is done.
      model: with which model.
      system: name of what is trained or asked; shard of the lessons.
      setting: the ratio at which a training is asked; of a method without training, that of the
        retrofit that it holds as much as, or empty for the reference.
      measure: what is asked.
    """

    kind: Literal["lessons", "training", "asking", "speed"]
    model: str
    system: str
    setting: str = ""
    measure: str = ""

    @property
    def name(self) -> str:
        """For files."""
        return "-".join(filter(None, (self.kind, self.model, self.label, self.measure)))

    @property
    def label(self) -> str:
        """The system at its setting."""
        return f"{self.system}-at{self.setting}" if self.setting else self.system


def jobs(config: Config) -> list[Job]:
    """Everything, in the order in which it is begun.

    One worker has a GPU to itself, so that trainings stand between the questions: first what the
    verdicts need, then trainings in the order of the settings, each with its questions. Where parts
    are asked for, those alone, in the order in which they are.

    Raises:
      ConfigError: nothing is given to measure, or a training or a part of the settings is not
        known, or what is to be judged learns no ratio.
    """
    if not config.models or config.data is None:
        raise dms_jax.ConfigError("give --data, and --qwen or --smollm2 or both.")
    for name in (*config.trainings, *filter(None, [config.judged])):
        if name not in TRAININGS:
            known = ", ".join(TRAININGS)
            raise dms_jax.ConfigError(f"there is no training {name!r}; there are {known}")
    judged = TRAININGS.get(config.judged)
    if judged and not (judged.model == QWEN and judged.evicts_as_trained):
        raise dms_jax.ConfigError(
            f"--judged {judged.name}: what has no ratio of its own is asked with as much as the "
            "judged training holds, which must be a retrofit of Qwen that learns its ratio."
        )
    names = dict.fromkeys(config.trainings or TRAININGS)
    wanted = [TRAININGS[name] for name in names if TRAININGS[name].model in config.models]
    order: list[Job] = []
    for part in _parts(config, wanted):
        order += [job for job in part if job.model in config.models and job not in order]
    return _chosen(config, order) if config.parts else order


def _chosen(config: Config, order: list[Job]) -> list[Job]:
    """The jobs that some part names, in the order of the parts."""
    found: list[Job] = []
    for part in config.parts:
        named = [job for job in order if fnmatch.fnmatchcase(job.name, part)]
        if not named:
            raise dms_jax.ConfigError(
                f"--parts {part}: no job of this plan is called so; --only list names them."
            )
        found += [job for job in named if job not in found]
    return found


def _parts(config: Config, wanted: list[Training]) -> Iterator[list[Job]]:
    """The jobs in the order of their worth; some of them more than once."""
    large = [each for each in wanted if each.model == QWEN]
    first = judged_first(config)
    rivals = [each for each in large if each.name in first]
    judged = [each for each in large if each.name in (first[0], CONTROL)]
    others = [each for each in large if each not in (*rivals, *judged) and not each.of_sweep]
    elsewhere = [each for each in others if each.name in _ELSEWHERE]
    sweep = [each for each in large if each.of_sweep]
    yield lessons(config, QWEN)
    yield [free(QWEN, VANILLA), Job("speed", QWEN, SPEED)]
    yield trained(rivals)
    if not config.judged:  # else nothing is elected
        yield [asked_of(each, UNSEEN)[0] for each in rivals]
    yield [asked_of(each, "gsm8k")[0] for each in rivals]
    yield trained(judged)
    yield [free(QWEN, name) for name in _AT_THE_PEAK]
    yield [asked_of(each, "gsm8k")[0] for each in judged]
    yield [free(QWEN, VANILLA, FRONTIER)]
    yield [asked_of(each, FRONTIER)[0] for each in judged[:1]]
    yield [free(QWEN, name) for name in _OF_THE_TABLE]
    yield [free(QWEN, VANILLA, HALF), *(asked_of(each, HALF)[0] for each in judged[:1])]
    for each in others:
        yield [*trained([each]), asked_of(each)[0]]
    yield [job for each in others for job in asked_of(each)]
    yield from _small(config, [each for each in wanted if each.model == SMOLLM2])
    yield [job for each in rivals for job in asked_of(each)]
    yield [asked_of(each, FRONTIER)[0] for each in judged]
    for measure in (UNSEEN, *OTHERS[QWEN]):
        yield [free(QWEN, VANILLA, measure)]
        yield [asked_of(each, measure)[0] for each in (*judged, *elsewhere)]
    yield [free(QWEN, name) for name in FREE]
    for measure in reversed(OTHERS[QWEN]):
        yield [free(QWEN, name, measure) for name in _FREE_ELSEWHERE]
    for setting in LIKE[QWEN]:
        yield [free(QWEN, name, setting=setting) for name in _BUDGETED]
    for each in sweep:
        yield [*trained([each]), *asked_of(each)]
    own = [each for each in (*rivals, *others) if not each.asked]
    yield [job for each in own for job in asked_of(each, *FRONTIERS)]


def _small(config: Config, wanted: list[Training]) -> Iterator[list[Job]]:
    """SmolLM2's: what ships, each training with its questions, and what needs no training."""
    yield lessons(config, SMOLLM2)
    for measure in MEASURES[SMOLLM2]:
        yield [free(SMOLLM2, VANILLA, measure)]
        yield [asked_of(each, measure)[0] for each in wanted if each.ships]
    for place, each in enumerate(wanted):
        if place == 2:  # the retrofit and its control are there
            yield [free(SMOLLM2, n, m) for m in MEASURES[SMOLLM2] for n in _FREE_ELSEWHERE]
        yield [*trained([each]), *asked_of(each)]
    for measure in MEASURES[SMOLLM2]:
        yield [free(SMOLLM2, name, measure) for name in FREE if SMOLLM2 in FREE[name].models]
    for setting in LIKE[SMOLLM2]:
        for measure in MEASURES[SMOLLM2]:
            yield [free(SMOLLM2, name, measure, setting=setting) for name in _BUDGETED]
    for measure in OTHERS[SMOLLM2]:
        yield [free(SMOLLM2, VANILLA, measure)]
        yield [asked_of(each, measure)[0] for each in wanted]
        yield [free(SMOLLM2, name, measure) for name in _FREE_ELSEWHERE]


def trained(trainings: list[Training]) -> list[Job]:
    """The jobs that train."""
    own = [each for each in trainings if not each.ships]
    return [Job("training", each.model, each.of or each.name) for each in own]


def lessons(config: Config, model: str) -> list[Job]:
    """The sampling of a model's answers, if it is measured."""
    if model not in config.models:
        return []
    return [Job("lessons", model, str(shard)) for shard in shards(config, model)]


def shards(config: Config, model: str) -> range:
    """The jobs that sample answers of a model."""
    return range(config.shards if model == QWEN else max(1, config.shards // 4))


def free(model: str, name: str, measure: str = "gsm8k", *, setting: str = "") -> Job:
    """A method that needs no training."""
    return Job("asking", model, name, setting, measure)


def asked_of(training: Training, *measures: str) -> list[Job]:
    """What a training is asked, the end of it first; all that it is asked unless given."""
    return [
        Job("asking", training.model, training.name, f"{ratio:g}", measure)
        for ratio in reversed(training.settings)
        for measure in measures or training.asked or MEASURES[training.model]
    ]


class Paths(Places):
    """Where things are in the run directory."""

    def __init__(self, config: Config):
        super().__init__(config.out)
        self.config = config

    def lessons(self, model: str, shard: int | str) -> pathlib.Path:
        return self.root / "lessons" / model / f"{shard}.jsonl"

    def training(self, name: str) -> pathlib.Path:
        """The run directory of a training."""
        return self.root / "trainings" / name

    def model(self, name: str, setting: str) -> pathlib.Path:
        """What a training exported at a ratio, or what ships."""
        name = TRAININGS[name].of or name
        if TRAININGS[name].ships:
            kept = KEPT / TRAININGS[name].ships
            return kept if kept.is_dir() else assets.path(TRAININGS[name].ships)
        if float(setting) in TRAININGS[name].snapshots:
            return self.training(name) / "snapshots" / setting
        return self.training(name) / "model"

    def summary(self, name: str) -> pathlib.Path:
        """The thinned log of a training, which says that it is done."""
        return self.root / "summaries" / f"{name}.json"

    def result(self, job: Job) -> pathlib.Path:
        folder = self.root / "results" / job.model / job.label
        return folder / f"{job.measure or job.kind}.json"

    def reference(self, model: str, measure: str, setting: str = "") -> pathlib.Path:
        """The figures of the retrofit that others are compared with at equal live tokens."""
        name, ratio = reference(self.config, model, setting)
        return self.result(Job("asking", model, name, ratio, measure))

    def taught(self, job: Job) -> pathlib.Path | None:
        """What a job takes from a run of `dms-jax retrofit self-taught`; None if it does not."""
        folder = self.config.self_taught
        if folder is None or job.model != QWEN:
            return None
        if job.kind == "lessons":
            return folder / "lessons.json"
        is_planned = job.kind == "training" and job.system == PLANNED
        return folder / "training" / "model" if is_planned else None

    def done(self, job: Job) -> bool:
        """Whether the files are there that a job is there to write."""
        if job.kind == "lessons":
            return self.lessons(job.model, job.system).exists()
        if job.kind == "training":
            return self.summary(job.system).exists() and not self._wanted_again(job)
        return self.result(job).exists()

    def _wanted_again(self, job: Job) -> bool:
        """Whether a training was left behind on another machine and there is more to ask of it."""
        training = TRAININGS[job.system]
        if self.model(job.system, f"{training.ratio:g}").exists():
            return False
        own = {name for name, each in TRAININGS.items() if (each.of or name) == job.system}
        asked = [each for each in jobs(self.config) if each.kind == "asking"]
        return any(each.system in own and not self.done(each) for each in asked)

    def ready(self, job: Job) -> bool:
        """Whether what a job needs is there."""
        elsewhere = self.taught(job)
        if elsewhere is not None:
            return elsewhere.exists()
        if job.kind == "training":
            every = shards(self.config, job.model)
            return all(self.lessons(job.model, shard).exists() for shard in every)
        if job.kind != "asking":
            return True
        if job.system in TRAININGS:
            training = TRAININGS[job.system]
            if not self.model(job.system, job.setting).exists():
                return False
            if training.policy is None or training.evicts_as_trained:
                return True
        else:
            method = FREE[job.system]
            if method.trained:
                return self.model(*reference(self.config, job.model)).exists()
            if method.make is None:
                return True
        vanilla = self.result(free(job.model, VANILLA, job.measure))
        return vanilla.exists() and self.reference(job.model, job.measure, job.setting).exists()
