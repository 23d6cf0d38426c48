"""The jobs of the measurement: sample and judge, train, ask, time."""

import dataclasses
import gc
import json
import pathlib
import shutil
import time
from typing import Any

import jax
import jax.numpy as jnp

import dms_jax
from dms_jax import assets
from dms_jax.command_line.options import SHIPPED
from dms_jax.command_line.self_taught.measuring import HeldOut
from dms_jax.data import Documents
from dms_jax.errors import OutOfMemoryError
from dms_jax.model.language_model import LanguageModel
from dms_jax.policies import KVzap, Policy
from dms_jax.training import train
from experiments.reproduction import runs
from experiments.reproduction.files import provenance, read_json, write_json, write_text
from experiments.reproduction.processes import own_place
from experiments.reproduction.queue import Queue
from experiments.reproduction.real.budgets import Match, calibrated, fitted, matched
from experiments.reproduction.real.lessons import (
    held_out_exchanges,
    self_taught,
    training_documents,
    write_lessons,
)
from experiments.reproduction.real.measures import measure
from experiments.reproduction.real.plan import Job, Paths, jobs
from experiments.reproduction.real.settings import Config
from experiments.reproduction.real.speed import time_methods
from experiments.reproduction.real.systems import FREE, TRAININGS, reference
from experiments.reproduction.real.training import Training

_LOGGED_EVERY = 10
_CHECKPOINT_EVERY = 100  # steps, where a checkpoint holds no whole model
# What may change from one command to the next of a run.
_FREE = ("data", "trainings", "parts", "lanes", "qwen", "smollm2", "self_taught", "join")
_FREE += ("run", "earlier", "also")


class Worker(Queue[Paths]):
    """One process of the plan.

    Args:
      config: the plan.
      deadline: seconds since the epoch after which nothing new is begun.
    """

    def __init__(self, config: Config, deadline: float):
        super().__init__(Paths(config), deadline)
        self.config = config
        self._bases: dict[str, LanguageModel] = {}

    def base(self, name: str) -> LanguageModel:
        """A model as it is published."""
        if name not in self._bases:
            self._bases[name] = self._load(self.config.models[name])
        return self._bases[name]

    def _load(self, path: str | pathlib.Path, **options: Any) -> LanguageModel:
        known = assets.path(str(path)) if str(path) in SHIPPED else path
        return dms_jax.load(known, dtype=jnp.bfloat16, **options)

    def wanted(self) -> list[Job]:
        """What is not done yet and is for this process.

        Where several share a GPU one of them trains; steps are timed where a process is alone.
        """
        place, sharing = own_place()
        others = {"training"} if place else set()
        others |= {"speed"} if sharing > 1 else set()
        own = [job for job in jobs(self.config) if job.kind not in others]
        if self.config.only == "speed":
            own = [job for job in own if job.kind == "speed"]
        return [job for job in own if not self.paths.done(job)]

    def _busy(self) -> bool:
        """Whether others may still make something to go on with."""
        awaited = [self.paths.taught(job) for job in jobs(self.config)]
        return super()._busy() or any(path is not None and not path.exists() for path in awaited)

    def _lessons(self, job: Job) -> None:
        taught = self.paths.taught(job)
        if taught is not None:  # the journal has every answer, and nothing is sampled
            journal = self.paths.lessons(job.model, job.system).with_suffix("")
            shutil.copytree(taught.parent / "answers", journal, dirs_exist_ok=True)
        write_lessons(self.config, self.base(job.model), job.model, int(job.system))

    def _training(self, job: Job) -> None:
        config, training = self.config, TRAININGS[job.system]
        base = self.base(job.model)
        documents = training_documents(config, job.model, base, training.lessons)
        folder = self.paths.training(training.name)
        taught = self.paths.taught(job)
        if taught is not None:
            left_out = shutil.ignore_patterns("checkpoints", ".lock")
            shutil.copytree(taught.parent, folder, dirs_exist_ok=True, ignore=left_out)
        else:
            self._train_anew(job, training, base, documents)
        steps = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        record = {
            "training": training.name,
            "model": job.model,
            "documents": len(documents),
            "tokens": sum(step["tokens"] for step in steps),
            "seconds": sum(step["seconds"] for step in steps),
            "recipe": training.to_dict(config),
            "bytes": sum(f.stat().st_size for f in (folder / "model").glob("*.safetensors")),
            "held_out": steps[-1].get("evaluation"),
            "steps": runs.thinned(steps, _LOGGED_EVERY),
            **provenance(),
        }
        write_json(self.paths.summary(training.name), record)
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # nothing is left to resume

    def _train_anew(
        self, job: Job, training: Training, base: LanguageModel, documents: list[Any]
    ) -> None:
        """Trains, or goes on; what is left is in the run directory of the training."""
        config, folder, held_out = self.config, self.paths.training(training.name), None
        if training.policy is None or training.evicts_as_trained:
            answers = held_out_exchanges(config, job.model)
            held_out = HeldOut(self_taught(config, job.model), base, answers)
        folder.parent.mkdir(parents=True, exist_ok=True)
        options: dict[str, Any] = dict(
            policy=training.policy,
            data=Documents(documents),
            out=folder,
            adapter_only=training.adapter_only,
            # And at its end, and where the time is over.
            checkpoint_every=_CHECKPOINT_EVERY if training.adapter_only else 10**6,
            evaluate=held_out,
            evaluate_every=10**6,
            progress=False,
        )
        if not self._train(base, training, options):
            shutil.rmtree(folder)
            write_text(self._remat, "Activations did not fit the memory: layers are recomputed.\n")
            self._train(base, training, options)

    def _train(self, base: LanguageModel, training: Training, options: dict[str, Any]) -> bool:
        """Trains; False if the first pass did not fit the memory."""
        recipe, remat = training.recipe(self.config), self._remat.exists()
        if remat:
            recipe = dataclasses.replace(recipe, remat="everything")
        left = min(max(self.deadline - time.time(), 1.0), 1e6)
        gc.collect()  # the cache of what was asked before
        try:
            train(base, recipe=recipe, stop_after=left, **options)
        except KeyboardInterrupt:
            self.check_time()  # it has stopped at a checkpoint, and goes on from there
            raise
        except OutOfMemoryError:
            if remat:
                raise
            return False
        finally:
            gc.collect()
        return True

    @property
    def _remat(self) -> pathlib.Path:
        """A file that says that trainings of this run recompute their layers."""
        return self.paths.root / "remat"

    def _asking(self, job: Job) -> None:
        self.check_time()
        model, policy, kv_dtype = self._system(job)
        start = time.time()
        folder, tries = self.paths.result(job).with_suffix(""), None
        if isinstance(policy, KVzap):
            match = self._matched(job, model, policy, folder)
            policy, found, tries = match.policy, match.found, match.tries
        else:
            found = measure(self.config, model, policy, job.measure, folder, kv_dtype=kv_dtype)
        record = {
            "model": job.model,
            "system": job.system,
            "setting": job.setting,
            "measure": job.measure,
            "policy": policy.to_dict(),
            "kv_dtype": kv_dtype,
            "thresholds": tries,
            "wall_seconds": time.time() - start,
            "device": jax.devices()[0].device_kind,
            **found,
            **provenance(),
        }
        write_json(self.paths.result(job), record)
        print(f"  {job.label} {job.measure}: {record['score']}, peak {record['peak']:.1f}")

    def _matched(
        self, job: Job, model: LanguageModel, policy: KVzap, folder: pathlib.Path
    ) -> Match:
        """Asks with one threshold after another; the answers with the last one stay."""

        def place(asked: KVzap) -> pathlib.Path:
            return folder.with_name(f"{folder.name}-at{asked.threshold:.6f}")

        def ask(asked: KVzap) -> dict[str, Any]:
            self.check_time()
            return measure(self.config, model, asked, job.measure, place(asked), kv_dtype=None)

        peak = read_json(self.paths.reference(job.model, job.measure, job.setting))["peak"]
        match = matched(ask, policy, peak)
        if place(match.policy).exists():
            shutil.rmtree(folder, ignore_errors=True)
            place(match.policy).rename(folder)
        for left in folder.parent.glob(f"{folder.name}-at*"):
            shutil.rmtree(left)
        return match

    def _system(self, job: Job) -> tuple[LanguageModel, Policy, str | None]:
        """The model, the policy and the type of the cache of a job that asks."""
        if job.system in TRAININGS:
            model, policy = self._trained(job.system, job.setting)
            if not TRAININGS[job.system].evicts_as_trained and policy != dms_jax.Vanilla():
                answers = held_out_exchanges(self.config, job.model)
                policy = fitted(self.paths, job, model, policy, answers)
            return model, policy, None
        method = FREE[job.system]
        if method.trained:
            return *self._trained(*reference(self.config, job.model)), method.kv_dtype
        policy: Policy = dms_jax.Vanilla()
        if method.make is not None:
            policy = calibrated(self.paths, job, method)
        return self.base(job.model), policy, method.kv_dtype

    def _trained(self, name: str, setting: str) -> tuple[LanguageModel, Policy]:
        training, path = TRAININGS[name], self.paths.model(name, setting)
        if training.adapter_only:
            model = self._load(self.config.models[training.model], adapter=path, merge=True)
        else:
            model = dms_jax.load(path)
        return model, training.policy or dms_jax.Vanilla()

    def _speed(self, job: Job) -> None:
        kept = self.paths.result(job).with_suffix(".jsonl")
        rows = time_methods(self.config, self.base(job.model), self.check_time, kept)
        sizes = {"batch": self.config.speed_batch, "context": self.config.speed_context}
        record = {"rows": rows, "device": jax.devices()[0].device_kind, **sizes, **provenance()}
        write_json(self.paths.result(job), record)


def worker(root: str, deadline: float, **own: Any) -> None:
    """Entry of a process: the plan is in the run directory; some settings may be its own."""
    config = runs.read_plan(Config, pathlib.Path(root))
    Worker(dataclasses.replace(config, **own), deadline).work()


def check_settings(config: Config) -> None:
    """Refuses to go on with other settings than those that made what is in the run directory.

    Raises:
      ConfigError: some setting differs, or nothing is given to measure.
    """
    jobs(config)
    runs.check_plan(config, _FREE)
