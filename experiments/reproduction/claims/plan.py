"""The jobs of the reproduction, and where their files are.

data/SHARD.npz                        self-written documents
trainings/NAME-SEED/                  a run directory of `dms_jax.train`: log, snapshots, model
summaries/NAME-SEED.json              the thinned log of a training that is done
results/NAME/SETTING-SEED-MEASURE.npz answers of one system at one setting
jobs/, locks/, failed/                see `experiments.reproduction.queue`
"""

import dataclasses
import pathlib
from typing import Literal

import dms_jax
from experiments.reproduction.claims.settings import Config
from experiments.reproduction.claims.systems import FREE, TRAININGS
from experiments.reproduction.queue import Places


@dataclasses.dataclass(frozen=True)
class Job:
    """A piece of work for one process.

    Attributes:
      kind: what is done.
      system: name of what is trained or asked.
      seed: seed of a training or of the draws; shard of the data.
      setting: what a system is asked at: a ratio, or a name.
    """

    kind: Literal["data", "training", "asking"]
    system: str
    seed: int
    setting: str = ""

    @property
    def name(self) -> str:
        """For files."""
        at = f"-at{self.setting}" if self.setting else ""
        return f"{self.kind}-{self.system}-{self.seed}{at}"


def jobs(config: Config) -> list[Job]:
    """Everything, in the order in which it is begun: seed by seed, long trainings first.

    Raises:
      ConfigError: a training of the settings is not known.
    """
    for name in config.trainings:
        if name not in TRAININGS:
            known = ", ".join(TRAININGS)
            raise dms_jax.ConfigError(f"there is no training {name!r}; there are {known}")
    wanted = [
        training
        for training in TRAININGS.values()
        if training.name in config.trainings or not config.trainings
    ]
    order = [Job("data", "data", shard) for shard in range(config.shards)]
    for seed in range(config.seeds):
        own = [each for each in wanted if seed < (each.seeds or config.seeds)]
        order += [Job("training", each.name, seed) for each in own]
        order += [
            Job("asking", each.name, seed, setting)
            for each in FREE.values()
            if seed < (each.seeds or config.seeds)
            and (each.model is None or TRAININGS[each.model] in wanted)
            for setting, _ in each.settings
        ]
        order += [
            Job("asking", each.name, seed, f"{ratio:g}") for each in own for ratio in each.settings
        ]
    return order


def left(config: Config) -> list[Job]:
    """What is not done yet; data only where something is to be trained on it."""
    paths = Paths(config)
    wanted = [job for job in jobs(config) if not paths.done(job)]
    if not any(job.kind == "training" for job in wanted):
        wanted = [job for job in wanted if job.kind != "data"]
    return wanted


def asked(job: Job) -> tuple[str, ...]:
    """The measures of a job that asks."""
    return (TRAININGS.get(job.system) or FREE[job.system]).measures


class Paths(Places):
    """Where things are in the run directory."""

    def __init__(self, config: Config):
        super().__init__(config.out)
        self.config = config

    def data(self, shard: int) -> pathlib.Path:
        return self.root / "data" / f"{shard}.npz"

    def training(self, name: str, seed: int) -> pathlib.Path:
        """The run directory of a training."""
        return self.root / "trainings" / f"{name}-{seed}"

    def model(self, name: str, seed: int, setting: str) -> pathlib.Path:
        """A trained model at a ratio."""
        training = TRAININGS[name]
        folder = self.training(name, seed)
        if float(setting) in training.snapshots:
            return folder / "snapshots" / setting
        return folder / "model"

    def result(self, job: Job, measure: str) -> pathlib.Path:
        return self.root / "results" / job.system / f"{job.setting}-{job.seed}-{measure}.npz"

    def summary(self, name: str, seed: int) -> pathlib.Path:
        """The thinned log of a training, which says that it is done."""
        return self.root / "summaries" / f"{name}-{seed}.json"

    def done(self, job: Job) -> bool:
        """Whether the files are there that a job is there to write."""
        if job.kind == "data":
            return self.data(job.seed).exists()
        if job.kind == "training":
            return self.summary(job.system, job.seed).exists()
        return all(self.result(job, measure).exists() for measure in asked(job))

    def ready(self, job: Job) -> bool:
        """Whether what a job needs is there."""
        if job.kind == "training":
            return all(self.data(shard).exists() for shard in range(self.config.shards))
        if job.kind == "asking" and (name := self.trained(job)) is not None:
            return self.model(name, job.seed, job.setting).exists()
        return True

    def trained(self, job: Job) -> str | None:
        """The training whose model a job asks; None for the base model."""
        if job.system in TRAININGS:
            return job.system
        return FREE[job.system].model
