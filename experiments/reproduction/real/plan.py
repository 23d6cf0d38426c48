"""The jobs, and where their files are.

lessons/MODEL/SHARD.jsonl             sampled answers, judged; SHARD/ is the journal of it
trainings/NAME/                       a run directory of `dms_jax.train`: log, snapshots, model
summaries/NAME.json                   the thinned log of a training that is done
results/MODEL/SYSTEM/MEASURE.json     figures of one system; answers/ beside it is its journal
jobs/, locks/, failed/                see `experiments.reproduction.queue`
"""

import dataclasses
import pathlib
from typing import Literal

import dms_jax
from experiments.reproduction.queue import Places
from experiments.reproduction.real.settings import Config
from experiments.reproduction.real.systems import (
    FREE,
    MEASURES,
    OTHERS,
    QWEN,
    REFERENCE,
    SMOLLM2,
    TRAININGS,
    VANILLA,
    Training,
)

SPEED = "speed"
FRONTIER = "frontier"
_FREE_ELSEWHERE = ("tova", "expected", "streaming")
_FIRST_FREE = (VANILLA, "tova", "expected", "snapkv", "streaming", "h2o")


@dataclasses.dataclass(frozen=True)
class Job:
    """A piece of work for one process.

    Attributes:
      kind: what is done.
      model: with which model.
      system: name of what is trained or asked; shard of the lessons.
      setting: the ratio at which a training is asked; empty for a method without training.
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
    """Everything, in the order in which it is begun; trainings in the order of the settings.

    Raises:
      ConfigError: a training of the settings is not known, or nothing is given to measure.
    """
    if not config.models or config.data is None:
        raise dms_jax.ConfigError("give --data, and --qwen or --smollm2 or both.")
    for name in config.trainings:
        if name not in TRAININGS:
            known = ", ".join(TRAININGS)
            raise dms_jax.ConfigError(f"there is no training {name!r}; there are {known}")
    names = dict.fromkeys(config.trainings or TRAININGS)
    wanted = [TRAININGS[name] for name in names if TRAININGS[name].model in config.models]
    large = [each for each in wanted if each.model == QWEN]
    small = [each for each in wanted if each.model == SMOLLM2]
    settled = [each for each in large if not each.snapshots]  # at the ratio of the verdict
    # What a GPU is kept busy with comes first: only one worker of each trains.
    order = lessons(config, QWEN) + trained(wanted) + lessons(config, SMOLLM2)
    if QWEN in config.models:
        order += [free(QWEN, VANILLA), Job("speed", QWEN, SPEED)]
    order += [job for each in large for job in asked_of(each)]
    if QWEN in config.models:
        order += [free(QWEN, name) for name in _FIRST_FREE[1:]]
        order += [free(QWEN, VANILLA, FRONTIER)]
        order += [asked_of(each, FRONTIER)[0] for each in settled if each.policy is not None]
    if SMOLLM2 in config.models:
        for measure in MEASURES[SMOLLM2]:
            order += [free(SMOLLM2, VANILLA, measure)]
            order += [asked_of(each, measure)[0] for each in small]
            order += [free(SMOLLM2, name, measure) for name in _FIRST_FREE[1:5]]
    if QWEN in config.models:
        for measure in OTHERS:
            order += [free(QWEN, VANILLA, measure)]
            order += [asked_of(each, measure)[0] for each in settled]
            order += [free(QWEN, name, measure) for name in _FREE_ELSEWHERE]
        order += [free(QWEN, name) for name in FREE if name not in _FIRST_FREE]
        order += [job for each in large if each.snapshots for job in asked_of(each, FRONTIER)]
    if SMOLLM2 in config.models:
        order += [
            free(SMOLLM2, name, measure)
            for measure in MEASURES[SMOLLM2]
            for name, each in FREE.items()
            if name not in _FIRST_FREE[:5] and SMOLLM2 in each.models
        ]
        order += [job for each in small for job in asked_of(each) if job not in order]
    return order


def trained(trainings: list[Training]) -> list[Job]:
    """The jobs that train."""
    return [Job("training", each.model, each.name) for each in trainings]


def lessons(config: Config, model: str) -> list[Job]:
    """The sampling of a model's answers, if it is measured."""
    if model not in config.models:
        return []
    return [Job("lessons", model, str(shard)) for shard in shards(config, model)]


def shards(config: Config, model: str) -> range:
    """The jobs that sample answers of a model."""
    return range(config.shards if model == QWEN else max(1, config.shards // 4))


def free(model: str, name: str, measure: str = "gsm8k") -> Job:
    """A method that needs no training."""
    return Job("asking", model, name, "", measure)


def asked_of(training: Training, *measures: str) -> list[Job]:
    """What a training is asked, the end of it first; all measures of its model unless given."""
    return [
        Job("asking", training.model, training.name, f"{ratio:g}", measure)
        for ratio in reversed(training.settings)
        for measure in measures or MEASURES[training.model]
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
        """What a training exported at a ratio."""
        if float(setting) in TRAININGS[name].snapshots:
            return self.training(name) / "snapshots" / setting
        return self.training(name) / "model"

    def summary(self, name: str) -> pathlib.Path:
        """The thinned log of a training, which says that it is done."""
        return self.root / "summaries" / f"{name}.json"

    def result(self, job: Job) -> pathlib.Path:
        folder = self.root / "results" / job.model / job.label
        return folder / f"{job.measure or job.kind}.json"

    def reference(self, model: str, measure: str) -> pathlib.Path:
        """The figures of the retrofit that others are compared with at equal live tokens."""
        training = TRAININGS[REFERENCE[model]]
        job = Job("asking", model, training.name, f"{training.ratio:g}", measure)
        return self.result(job)

    def done(self, job: Job) -> bool:
        """Whether the files are there that a job is there to write."""
        if job.kind == "lessons":
            return self.lessons(job.model, job.system).exists()
        if job.kind == "training":
            return self.summary(job.system).exists()
        return self.result(job).exists()

    def ready(self, job: Job) -> bool:
        """Whether what a job needs is there."""
        if job.kind == "training":
            every = shards(self.config, job.model)
            return all(self.lessons(job.model, shard).exists() for shard in every)
        if job.kind != "asking":
            return True
        if job.system in TRAININGS:
            return self.model(job.system, job.setting).exists()
        method = FREE[job.system]
        if method.trained is not None:
            return self.summary(method.trained).exists()
        if method.make is None:
            return True
        vanilla = self.result(free(job.model, VANILLA, job.measure))
        return vanilla.exists() and self.reference(job.model, job.measure).exists()
