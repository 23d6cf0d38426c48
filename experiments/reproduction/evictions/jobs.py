"""The jobs: write data, train, ask."""

import json
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dms_jax
from dms_jax.evaluation import Serving, evaluate, mean_over_problems
from dms_jax.model.language_model import LanguageModel
from dms_jax.policies import Policy
from experiments.reproduction import runs
from experiments.reproduction.curve.data import Sequences, read_documents, write_documents
from experiments.reproduction.evictions.plan import (
    Config,
    Job,
    Paths,
    jobs,
    systems,
)
from experiments.reproduction.files import provenance, write_json

_LOGGED_EVERY = 20
_FREE = ("systems", "lanes")
_CALIBRATION_BATCHES = 4


class Worker(runs.Worker[Paths, Config]):
    """One process of the plan.

    Args:
      config: the plan.
      deadline: seconds since the epoch after which nothing new is begun.
    """

    def __init__(self, config: Config, deadline: float):
        super().__init__(config, Paths(config), deadline)
        self.systems = systems(config.hidden)

    def wanted(self) -> list[Job]:
        """What is not done yet; data only where something is to be trained on it."""
        wanted = [job for job in jobs(self.config) if not self.paths.done(job)]
        if not any(job.kind == "training" for job in wanted):
            wanted = [job for job in wanted if job.kind != "data"]
        return wanted

    def _sequences(self, seed: int, batch_size: int) -> Sequences:
        return Sequences(
            read_documents([self.paths.data(shard) for shard in range(self.config.shards)]),
            batch_size=batch_size,
            length=self.config.sequence_length,
            seed=seed,
        )

    def _data(self, job: Job) -> None:
        shard = int(job.ratio)
        write_documents(self.base, self.config, self.paths.data(shard), seed=shard)

    def _training(self, job: Job) -> None:
        system = self.systems[job.system]
        assert system.policy is not None
        recipe = system.make_recipe(self.config)
        folder = self.paths.training(job.system)
        folder.parent.mkdir(parents=True, exist_ok=True)
        sequences = self._sequences(0, recipe.pass_size(1))
        start = time.time()
        try:
            dms_jax.retrofit(
                self.base,
                system.policy,
                recipe=recipe,
                data=sequences,
                out=folder,
                checkpoint_every=10**6,  # at its end, and where the time is over
                stop_after=min(max(self.deadline - time.time(), 1.0), 1e6),
                progress=False,
            )
        except KeyboardInterrupt:
            self.check_time()  # it has stopped at a checkpoint, and goes on from there
            raise
        steps = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        record = {
            "training": job.system,
            "tokens": sum(step["tokens"] for step in steps),
            "step_seconds": float(np.median([step["seconds"] for step in steps])),
            "seconds": time.time() - start,
            "steps": runs.thinned(steps, _LOGGED_EVERY),
        }
        write_json(self.paths.summary(job.system), record)

    def _asking(self, job: Job) -> None:
        system = self.systems[job.system]
        model = self.base
        if system.recipe is not None:
            folder = self.paths.model(job.system, job.ratio)
            model = dms_jax.load(folder, dtype=model.dtype)
        fitted: Policy | None = system.policy or dms_jax.Vanilla()
        kept = None
        if system.recipe is not None and system.budgeted(job.ratio, "reasoning") is None:
            # Held out: the order of another seed, of which a training sees few rows first.
            batches = self._held_out()
            fitted = dms_jax.calibrate(
                model, batches, compression_ratio=job.ratio, policy=system.policy
            )
            kept = kept_shares(model, fitted, batches)
        answers: dict[str, Any] = {}
        result: dict[str, Any] = {
            "system": job.system,
            "ratio": job.ratio,
            "kept": kept,
            "answers": answers,
            "device": jax.devices()[0].device_kind,
            **provenance(),
        }
        policy = system.budgeted(job.ratio, "reasoning") or fitted
        assert policy is not None
        result |= {"policy": policy.to_dict(), "text": self.text(model, policy)}
        for measure in self.config.measures:
            self.check_time()
            policy = system.budgeted(job.ratio, measure) or fitted
            assert policy is not None
            part = answers[measure] = self.answers(model, policy, measure)
            print(f"  {job.name}: {part['accuracy']:.1%} at {part['peak']:.0f}", flush=True)
        write_json(self.paths.result(job.system, job.ratio), result)

    def _held_out(self) -> list[dict[str, np.ndarray]]:
        """Worked problems of the validation split, in batches of sequences that are packed."""
        worked = self._worked(8 * self.config.problems)[self.config.texts :]
        documents = [(np.asarray(ids, np.int32), start) for ids, start in worked]
        packed = Sequences(documents, batch_size=8, length=self.config.sequence_length, seed=0)
        return [next(packed) for _ in range(_CALIBRATION_BATCHES)]

    def _worked(self, count: int) -> list[tuple[list[int], int]]:
        """Prompts with their solutions, and how many tokens are the prompt."""
        tokenizer, tasks, made = self.base.tokenizer, self.config.tasks("reasoning"), []
        for index in range(count):
            problem = tasks[index % len(tasks)].problem("validation", index // len(tasks))
            prompt = tokenizer.encode(problem.prompt)
            answer = tokenizer.encode(problem.solution, add_special_tokens=False)
            made.append(([*prompt, *answer, tokenizer.eos_token_id], len(prompt)))
        return made

    def text(self, model: LanguageModel, policy: Policy) -> dict[str, Any]:
        """The loss of worked problems that are read one token at a time from the cache."""
        worked = self._worked(self.config.texts)
        scores = dms_jax.score(
            model, [ids for ids, _ in worked], policy=policy, page_size=self.config.page_size
        )
        losses = [
            float(-score.logprobs[start - 1 :].mean())
            for score, (_, start) in zip(scores, worked, strict=True)
        ]
        mean = lambda name: float(np.mean([getattr(s.usage, name) for s in scores]))  # noqa: E731
        return {
            "losses": [round(loss, 5) for loss in losses],
            "live": mean("live_tokens"),
            "peak": mean("peak_tokens"),
            "reads": mean("kv_reads"),
        }

    def answers(self, model: LanguageModel, policy: Policy, measure: str) -> dict[str, Any]:
        """The answers to the questions of a measure."""
        config = self.config
        reasoning = measure == "reasoning"
        problems = config.problems if reasoning else config.retrieval_problems
        chains = config.chains if reasoning else 1
        result = evaluate(
            model,
            config.tasks(measure),
            policy=policy,
            problems=problems,
            chains=chains,
            sampling=dms_jax.Sampling(
                temperature=config.temperature,
                max_new_tokens=config.new_tokens if reasoning else 128,
            ),
            seed=0,
            serving=Serving(lanes=min(config.lanes, problems * chains), page_size=config.page_size),
        )
        accuracy = mean_over_problems(result.scores)
        return {
            "accuracy": accuracy.value,
            "error": accuracy.error,
            "scores": np.round(result.scores.mean(1), 4).tolist(),
            "peak": float(result.peak.mean()),
            "live": float(result.live.mean()),
            "reads": float(result.reads.mean()),
            "new_tokens": float(result.new_tokens.mean()),
            "ended": float(result.ended.mean()),
            "tasks": {name: result.of_task(name).accuracy.value for name in result.tasks},
            "seconds": result.seconds,
        }


def kept_shares(model: LanguageModel, policy: Policy, batches: list[dict]) -> list[list[float]]:
    """Returns the share of tokens that each layer and head keeps beyond the window, [L][K]."""

    @jax.jit
    def shares(transformer, tokens, ids):
        decisions = transformer(tokens, policy, segment_ids=ids).decisions  # [L, B, K, T]
        real = (ids > 0)[None, :, None]
        return jnp.where(real, decisions, 0).sum((1, 3)) / (ids > 0).sum()

    found = [
        shares(model.transformer, jnp.asarray(one["tokens"]), jnp.asarray(one["segment_ids"]))
        for one in batches
    ]
    kept = 1 - np.mean([np.asarray(one, np.float64) for one in found], axis=0)
    return np.round(kept, 4).tolist()


def worker(root: str, deadline: float) -> None:
    """Entry of a process: the plan is in the run directory."""
    Worker(runs.read_plan(Config, pathlib.Path(root)), deadline).work()


def check_settings(config: Config) -> None:
    """Refuses to go on with other settings than those that made what is in the run directory.

    Raises:
      ConfigError: some setting differs.
    """
    runs.check_plan(config, _FREE)
