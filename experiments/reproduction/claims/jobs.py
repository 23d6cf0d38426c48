"""The jobs of the reproduction: write data, train, ask."""

import json
import pathlib
import time

import jax
import numpy as np

import dms_jax
from dms_jax.evaluation import Serving, evaluate, percent
from dms_jax.model.language_model import LanguageModel
from dms_jax.policies import Policy
from dms_jax.training import train
from experiments.reproduction import runs
from experiments.reproduction.claims.plan import Job, Paths, asked, jobs, left
from experiments.reproduction.claims.settings import Config
from experiments.reproduction.claims.systems import FREE, TRAININGS, measures
from experiments.reproduction.curve.data import Sequences, read_documents, write_documents
from experiments.reproduction.files import (
    provenance,
    write_arrays,
    write_json,
)

QUEST_PAGE = 16
_LOGGED_EVERY = 20
# What may change from one command to the next of a run.
_FREE = ("trainings", "seeds", "lanes")


class Worker(runs.Worker[Paths, Config]):
    """One process of the plan.

    Args:
      config: the plan.
      deadline: seconds since the epoch after which nothing new is begun.
    """

    def __init__(self, config: Config, deadline: float):
        super().__init__(config, Paths(config), deadline)

    def wanted(self) -> list[Job]:
        return left(self.config)

    def _data(self, job: Job) -> None:
        write_documents(self.base, self.config, self.paths.data(job.seed), seed=job.seed)

    def _training(self, job: Job) -> None:
        config, training = self.config, TRAININGS[job.system]
        recipe = training.recipe(config)
        sequences = Sequences(
            read_documents([self.paths.data(shard) for shard in range(config.shards)]),
            batch_size=recipe.pass_size(1),
            length=recipe.sequence_length,
            seed=job.seed,
        )
        model = self.base
        if training.scratch:
            model = dms_jax.initialize(
                model.config, seed=job.seed, dtype=model.dtype, tokenizer=model.tokenizer
            )
        folder = self.paths.training(training.name, job.seed)
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            train(
                model,
                policy=training.policy,
                recipe=recipe,
                data=sequences,
                out=folder,
                seed=job.seed,
                checkpoint_every=10**6,  # at its end, and where the time is over
                stop_after=min(max(self.deadline - time.time(), 1.0), 1e6),
                progress=False,
            )
        except KeyboardInterrupt:
            self.check_time()  # it has stopped at a checkpoint, and goes on from there
            raise
        steps = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        record = {
            "training": training.name,
            "seed": job.seed,
            "tokens": sum(step["tokens"] for step in steps),
            "seconds": sum(step["seconds"] for step in steps),
            "sequences": sequences.rows,
            "document_tokens": sequences.tokens,
            "steps": runs.thinned(steps, _LOGGED_EVERY),
        }
        write_json(self.paths.summary(training.name, job.seed), record)

    def _asking(self, job: Job) -> None:
        trained = self.paths.trained(job)
        model = self.base
        if trained is not None:
            folder = self.paths.model(trained, job.seed, job.setting)
            model = dms_jax.load(folder, dtype=model.dtype)
        if job.system in TRAININGS:
            policy = TRAININGS[job.system].policy or dms_jax.Vanilla()
        else:
            policy = dict(FREE[job.system].settings)[job.setting]
        for name in asked(job):
            self.measure(model, policy, job, name)

    def measure(self, model: LanguageModel, policy: Policy, job: Job, name: str) -> None:
        """Asks the questions of a measure, unless that is done."""
        path = self.paths.result(job, name)
        if path.exists():
            return
        self.check_time()
        config, measure = self.config, measures(self.config)[name]
        result = evaluate(
            model,
            measure.tasks,
            policy=policy,
            problems=measure.problems,
            chains=measure.chains,
            sampling=dms_jax.Sampling(
                temperature=config.temperature, max_new_tokens=measure.new_tokens
            ),
            seed=job.seed,
            serving=Serving(
                lanes=min(config.lanes, measure.problems * measure.chains),
                page_size=QUEST_PAGE if isinstance(policy, dms_jax.Quest) else config.page_size,
            ),
        )
        described = {
            "system": job.system,
            "setting": job.setting,
            "seed": job.seed,
            "measure": name,
            "policy": policy.to_dict(),
            "new_tokens": measure.new_tokens,
            "compression_ratio": result.compression_ratio,
            "seconds": result.seconds,
            "device": jax.devices()[0].device_kind,
            **provenance(),
        }
        write_arrays(
            path,
            described=np.asarray(json.dumps(described)),
            scores=result.scores.astype(np.float16),
            answers=answer_numbers(result.answers),
            answer_scores=result.answer_scores.astype(np.float16),
            reads=np.round(result.reads).astype(np.int32),
            peak=result.peak.astype(np.float32),
            new_tokens=result.new_tokens.astype(np.int16),
            ended=result.ended,
        )
        shown = f"peak {result.peak_per_problem:.0f}, {result.seconds:.1f} s"
        accuracy = percent(result.accuracy.to_list())
        print(f"  {job.system} {path.stem}: {accuracy}, {shown}", flush=True)


def answer_numbers(answers: tuple[tuple[str | None, ...], ...]) -> np.ndarray:
    """Numbers the answers to each problem; -1 for a chain without one.

    # In: [("7", None, "8", "7")]  Out: [[0, -1, 1, 0]]
    """
    numbers = np.full((len(answers), len(answers[0])), -1, np.int16)
    for problem, own in enumerate(answers):
        known: dict[str, int] = {}
        for chain, answer in enumerate(own):
            if answer is not None:
                numbers[problem, chain] = known.setdefault(answer, len(known))
    return numbers


def worker(root: str, deadline: float) -> None:
    """Entry of a process: the plan is in the run directory."""
    Worker(runs.read_plan(Config, pathlib.Path(root)), deadline).work()


def check_settings(config: Config) -> None:
    """Refuses to go on with other settings than those that made what is in the run directory.

    Raises:
      ConfigError: some setting differs, or a training is not known.
    """
    jobs(config)
    runs.check_plan(config, _FREE)
