"""The jobs of the first curve: write data, train, evaluate; and the queue they are taken from."""

import pathlib
import time
from typing import Any

import numpy as np

import dms_jax
from dms_jax.command_line.comparison.systems import limit_for
from dms_jax.evaluation import Serving, evaluate, percent
from dms_jax.model.language_model import LanguageModel
from dms_jax.policies import Policy
from dms_jax.training import Recipe, Stage, train
from experiments.reproduction import runs
from experiments.reproduction.curve.data import Sequences, read_documents, write_documents
from experiments.reproduction.curve.plan import (
    CHOICE_RATIO,
    CHOICE_START,
    LONGEST,
    VARIANTS,
    Config,
    Job,
    Paths,
    Variant,
    left,
)
from experiments.reproduction.files import read_json, refuse_other_settings, write_json

_LOGGED_EVERY = 10


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

    # -- the jobs ---------------------------------------------------------------------------------

    def _data(self, job: Job) -> None:
        write_documents(self.base, self.config, self.paths.data(job.index), seed=job.index)

    def _vanilla(self, job: Job) -> None:
        for task in self.config.asked:
            self.measure(self.base, dms_jax.Vanilla(), job.system, "1", job.index, task)

    def _training_free(self, job: Job) -> None:
        """One rung of the ladder: budgets that leave so many times fewer tokens than vanilla."""
        ratio = self.config.ladder[job.index]
        for task in self.config.asked:
            lengths = self._vanilla_lengths(task)
            policy = policy_at(job.system, lengths, lengths.mean() / ratio)
            for seed in range(self.config.seeds):
                self.measure(self.base, policy, job.system, f"{ratio:g}", seed, task)

    def _further(self, job: Job) -> None:
        recipe = self.retrofit_recipe(LONGEST).control(LONGEST.policy)
        model = self.train(job, recipe, None)
        for task in self.config.asked:
            self.measure(model, dms_jax.Vanilla(), job.system, "1", job.index, task)

    def _retrofit(self, job: Job) -> None:
        config, variant = self.config, VARIANTS[job.system]

        def on_snapshot(ratio: float, model: LanguageModel) -> None:
            if job.index == 0:
                dms_jax.save(model, variant.policy, self.paths.model(job.system, 0, ratio))
            extra = (config.choice,) if ratio == CHOICE_RATIO else ()
            for task in (*config.asked, *extra):
                self.measure(model, variant.policy, job.system, f"{ratio:g}", job.index, task)

        recipe = self.retrofit_recipe(variant)
        self.train(job, recipe, variant.policy, on_snapshot=on_snapshot)

    def retrofit_recipe(self, variant: Variant) -> Recipe:
        """The borrowed neuron fades where there is one; then one ramp passes through all ratios."""
        config = self.config
        highest = max(config.ratios)
        steps = round((highest - 1) * config.steps_per_ratio)
        return self.recipe(
            variant.name,
            (
                Stage("neuron_decay", config.decay_steps, config.decay_learning_rate),
                Stage(
                    "ramp",
                    steps,
                    config.learning_rate,
                    highest,
                    adapter_learning_rate=config.adapter_learning_rate,
                ),
            ),
            trainable=variant.trainable,
            snapshots=config.ratios,
        )

    def recipe(self, name: str, stages: tuple[Stage, ...], **changes: Any) -> Recipe:
        """What all runs have in common, with their own stages."""
        config = self.config
        return Recipe(
            name=name,
            stages=stages,
            sequence_length=config.sequence_length,
            batch_size=config.batch_size,
            micro_batch_size=config.micro_batch_size,
            weight_decay=0.1,
            remat="nothing",
            unroll=True,
            packing="first_fit",
            **changes,
        )

    def train(
        self, job: Job, recipe: Recipe, policy: Policy | None, **reports: Any
    ) -> LanguageModel:
        """Trains on the documents of all shards and writes the thinned log."""
        shards = [self.paths.data(shard) for shard in range(self.config.shards)]
        sequences = Sequences(
            read_documents(shards),
            batch_size=recipe.pass_size(1),
            length=recipe.sequence_length,
            seed=job.index,
        )
        log: list[dict[str, Any]] = []
        last = recipe.total_steps(policy or dms_jax.Vanilla())

        def on_step(record: dict[str, Any]) -> None:
            self.check_time()
            if record["step"] % _LOGGED_EVERY == 0 or record["step"] == last:
                log.append(runs.rounded(record))

        start = time.time()
        model = train(
            self.base,
            policy=policy,
            recipe=recipe,
            data=sequences,
            seed=job.index,
            on_step=on_step,
            progress=False,
            **reports,
        )
        data = {"sequences": sequences.rows, "tokens": sequences.tokens}
        record = {"data": data, "seconds": time.time() - start, "steps": log}
        write_json(self.paths.training(job), record)
        return model

    def measure(
        self,
        model: LanguageModel,
        policy: Policy,
        system: str,
        setting: str,
        seed: int,
        task: str,
    ) -> None:
        """Evaluates one system at one setting on one task, unless that is done.

        For `Config.choice` it answers validation problems of the first task, others than those
        that settings are chosen on.
        """
        path = self.paths.result(system, setting, seed, task)
        if path.exists():
            return
        self.check_time()
        config = self.config
        choosing = task == config.choice
        task = config.asked[0] if choosing else task
        reasoning = task == "reasoning"
        result = evaluate(
            model,
            config.tasks()[task],
            policy=policy,
            problems=config.problems if reasoning else config.retrieval_problems,
            split="validation" if choosing else config.split,
            start=CHOICE_START if choosing else 0,
            chains=config.chains if reasoning else 1,
            sampling=dms_jax.Sampling(
                temperature=config.temperature, max_new_tokens=config.new_tokens(task)
            ),
            seed=seed,
            serving=Serving(lanes=config.lanes, page_size=config.page_size),
        )
        data = result.to_dict(problems=True, samples=2)
        write_json(path, {"system": system, "setting": setting, **data})
        score = percent(data["accuracy"])
        peak, seconds = f"peak {data['peak']:.0f}", f"{result.seconds:.1f} s"
        print(f"  {path.parent.name} {path.stem}: {score}, {peak}, {seconds}", flush=True)

    def _vanilla_lengths(self, task: str) -> np.ndarray:
        """The most tokens that a chain of each problem came to hold in the plain cache."""
        data = read_json(self.paths.result("vanilla", "1", 0, task))
        assert data is not None
        return np.asarray(data["per_problem"]["peak"]) / data["chains"]


def policy_at(system: str, lengths: np.ndarray, peak: float) -> Policy:
    """The training-free policy whose peak over sequences of these lengths has this mean."""
    if system == "RandomEviction":
        window = 16
        rate = 1 - (peak - window - 1) / (lengths.mean() - window - 1)
        return dms_jax.RandomEviction(window=window, rate=float(np.clip(rate, 0, 1)))
    limit = limit_for(lengths, peak)
    if system == "TOVA":
        # The current token comes on top, and a prompt takes no more than that.
        return dms_jax.TOVA(budget=max(limit - 1, 1), prefill="evict_past_budget")
    return dms_jax.StreamingLLM(budget=max(limit, 5))


def worker(root: str, deadline: float) -> None:
    """Entry of a process: the plan is in the run directory."""
    Worker(runs.read_plan(Config, pathlib.Path(root)), deadline).work()


# What documents come of, and what may change from one command to the next of a run.
_OF_DOCUMENTS = ("model", "shards", "documents", "document_tokens", "document_temperature")
_FREE = runs.FREE | {"variants", "seeds", "ladder", "asked", "lanes"}


def check_settings(config: Config) -> None:
    """Refuses to go on with other settings than those that made what is in the run directory.

    Raises:
      ConfigError: some setting differs.
    """
    if not (config.out / "config.json").exists():
        return
    made = {name for name in ("data", "results") if any((config.out / name).glob("*"))}
    names = set(_OF_DOCUMENTS) if made == {"data"} else set(vars(config)) - _FREE
    before = runs.read_plan(Config, config.out)
    refuse_other_settings(before, config, names if made else set())
