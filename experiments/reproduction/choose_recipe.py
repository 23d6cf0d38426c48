"""Which recipe keeps reasoning best at one compression ratio; chosen on validation problems.

Every trial retrofits the base model on the documents of a first-curve run, up to one ratio, and is
measured in two ways: answers to validation problems, decoded from the real cache; and how far its
distributions moved from the base model's on documents that it did not see, with its hard decisions
and, to tell drift from eviction, with nothing evicted.

    python -m experiments.reproduction.first_curve --only data --out runs/first_curve
    python -m experiments.reproduction.choose_recipe --out runs/first_curve
"""

import dataclasses
import pathlib
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dms_jax
from dms_jax.command_line.running import FAILED, run, status_of
from dms_jax.evaluation import Serving, difference, evaluate, percent
from dms_jax.model.language_model import LanguageModel
from dms_jax.policies import Policy
from dms_jax.training import Stage
from experiments.reproduction.curve.data import read_documents
from experiments.reproduction.curve.jobs import Worker
from experiments.reproduction.curve.plan import Config as Plan
from experiments.reproduction.curve.plan import Job, Paths, Variant
from experiments.reproduction.files import provenance, read_json, write_json
from experiments.reproduction.processes import environment, gpu_of, stop, visible_gpus

VARIANT = Variant("adapter", 0, 16)
BASE = "base"  # the model that no trial has touched, measured like them
_BATCH = 16  # documents a pass of the comparison with the base model


@dataclasses.dataclass(frozen=True)
class Trial:
    """One recipe.

    Attributes:
      learning_rate: of all weights.
      adapter_learning_rate: of the adapter; None for the control, which evicts nothing and learns
        language modelling.
      steps_per_ratio: steps a unit of compression ratio.
      final_learning_rate: what half a cosine over the ramp falls to; None for constant rates.
    """

    learning_rate: float
    adapter_learning_rate: float | None = None
    steps_per_ratio: int = 300
    final_learning_rate: float | None = None

    def stage(self, ratio: float) -> Stage:
        """Up to a compression ratio."""
        steps = round((ratio - 1) * self.steps_per_ratio)
        if self.adapter_learning_rate is None:
            return Stage("train", steps, self.learning_rate)
        return Stage(
            "ramp",
            steps,
            self.learning_rate,
            ratio,
            adapter_learning_rate=self.adapter_learning_rate,
            final_learning_rate=self.final_learning_rate,
        )


TRIALS = {
    "adapter-600": Trial(3e-5, 3e-4, 600),
    "adapter": Trial(3e-5, 3e-4),
    "adapter-fast": Trial(3e-5, 1e-3),
    "adapter-1e-5": Trial(1e-5, 1e-3),
    "adapter-1e-4": Trial(1e-4, 1e-3),
    "adapter-1e-4-cosine": Trial(1e-4, 1e-3, final_learning_rate=1e-6),
    "adapter-100": Trial(3e-5, 3e-4, 100),
    "adapter-2e-4-100": Trial(2e-4, 6e-4, 100),
    "control": Trial(3e-5),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Compare recipes at one compression ratio."""

    out: pathlib.Path = pathlib.Path("runs/first_curve")
    """Run directory of a first curve, with its documents; recipes/ and recipes.json go there."""
    model: str = ""
    """Hugging Face directory of the base model; the shipped reasoning model unless given."""
    trials: tuple[str, ...] = ()
    """Trials to run, by name; all unless given."""
    ratio: float = 4.0
    """Compression ratio that is gone up to."""
    processes: int = 1
    """Workers, which take turns on the GPUs."""
    shards: int = 8
    """Parts that the documents lie in; nobody trains on the last."""
    batch_size: int = 32
    """Sequences of an optimizer step."""
    sequence_length: int = 2048
    """Tokens of a training sequence."""
    task: str = "reasoning"
    """What is asked; see `first_curve.py`."""
    problems: int = 480
    """Problems of the validation split; a third of each kind of reasoning."""
    chains: int = 4
    """Answers to each problem."""
    max_new_tokens: int = 700
    """Most new tokens of an answer."""
    needle_size: int = 450
    """Words of a needle's haystack, where that is the task."""
    documents: int = 192
    """Unseen documents for the distance from the base model."""

    def __post_init__(self):
        for name in self.trials:
            if name not in (BASE, *TRIALS):
                known = ", ".join(TRIALS)
                raise dms_jax.ConfigError(f"there is no trial {name!r}; there are {known}")
        if not self.ratio > 1:
            raise dms_jax.ConfigError(f"ratio must be above 1, got {self.ratio}")
        for name in ("processes", "problems", "chains", "max_new_tokens", "documents"):
            if getattr(self, name) < 1:
                raise dms_jax.ConfigError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.shards < 2:
            raise dms_jax.ConfigError("one shard is held out, so that at least two are needed")
        self.plan()  # checks what it has in common with this

    def plan(self) -> Plan:
        """The same in words of the first curve."""
        return Plan(
            out=self.out,
            model=self.model,
            shards=self.shards - 1,
            batch_size=self.batch_size,
            sequence_length=self.sequence_length,
            asked=(self.task,),
            needle_size=self.needle_size,
        )


def check_documents(config: Config) -> None:
    """Refuses to begin without the documents of every shard.

    Raises:
      ConfigError: some are not there.
    """
    for shard in range(config.shards):
        if not Paths(config.plan()).data(shard).exists():
            raise dms_jax.ConfigError(
                f"--out {config.out} has no documents of shard {shard}; write them first: python "
                f"-m experiments.reproduction.first_curve --only data --out {config.out}"
            )


def main(config: Config) -> list[dict[str, Any]] | int:
    """Runs the trials that are left in processes of their own, and prints and writes all."""
    check_documents(config)
    folder = config.out / "recipes"
    names = dict.fromkeys((BASE, *(config.trials or TRIALS)))
    left = [name for name in names if not (folder / f"{name}.json").exists()]
    workers, gpus = [], visible_gpus()
    try:
        for index in range(min(config.processes, len(left))):
            own = dataclasses.replace(config, trials=tuple(left[index :: config.processes]))
            program = (
                "from pathlib import *; from experiments.reproduction.choose_recipe import *; "
                f"entry({own!r})"
            )
            gpu = gpu_of(index, config.processes, gpus)
            workers.append(
                subprocess.Popen([sys.executable, "-c", program], env=environment(config.out, gpu))
            )
        failed = sum(worker.wait() != 0 for worker in workers)
    finally:
        stop(workers)
    if failed:
        print(f"{failed} of {len(workers)} workers failed", file=sys.stderr)
        return FAILED
    rows = [read_json(path) for path in sorted(folder.glob("*.json"))]
    rows.sort(key=lambda row: -row["accuracy"][0])
    show(rows)
    kept = [
        {key: value for key, value in row.items() if key != "per_problem"} | {"above": above}
        for row, above in zip(rows, differences(rows), strict=True)
    ]
    write_json(config.out / "recipes.json", {"ratio": config.ratio, "trials": kept})
    return rows


def differences(rows: list[dict[str, Any]]) -> list[dict[str, list[float | None]]]:
    """What each trial has above each other, paired by problem: accuracy and its standard error."""
    scores = {row["trial"]: np.asarray([row["per_problem"]["scores"]], np.float64) for row in rows}
    pairs = {
        name: {other: difference(own, scores[other]) for other in scores if other != name}
        for name, own in scores.items()
    }
    return [{other: gap.to_list() for other, gap in above.items()} for above in pairs.values()]


def show(rows: list[dict[str, Any]]) -> None:
    """Prints a line for each trial."""
    headings = f"{'correct, %':>14}{'peak':>7}{'KL':>10}{'dense KL':>10}{'steps':>7}{'s':>6}"
    print(f"{'trial':22}{headings}")
    for row in rows:
        print(
            f"{row['trial']:22}{percent(row['accuracy']):>14}{row['peak']:7.0f}"
            f"{row['kl']:10.5f}{row['kl_dense']:10.5f}{row['steps']:7}{row['seconds']:6.0f}"
        )


def entry(config: Config) -> None:
    """Entry of a process; the first one says that all were interrupted."""
    sys.exit(status_of(lambda: work(config), interrupted=""))


def work(config: Config) -> None:
    """Does the trials one after another."""
    worker = Worker(config.plan(), float("inf"))
    for name in config.trials:
        start = time.time()
        if name == BASE:
            measure(config, worker.base, worker.base, dms_jax.Vanilla(), name, {"steps": 0}, start)
            continue
        trial = TRIALS[name]
        control = trial.adapter_learning_rate is None
        policy = dms_jax.Vanilla() if control else VARIANT.policy
        recipe = worker.recipe(
            name,
            (trial.stage(config.ratio),),
            trainable="all",
            loss="language_modeling" if control else "distillation",
        )
        job = Job("further" if control else "retrofit", f"recipe-{name}", 0)
        model = worker.train(job, recipe, None if control else policy)
        record = {"settings": vars(trial), "steps": recipe.total_steps(policy)}
        measure(config, worker.base, model, policy, name, record, start)


def measure(
    config: Config,
    base: LanguageModel,
    model: LanguageModel,
    policy: Policy,
    name: str,
    record: dict[str, Any],
    start: float,
) -> None:
    """Writes what a model does under its policy, and how far it is from the base model."""
    plan = config.plan()
    result = evaluate(
        model,
        plan.tasks()[config.task],
        policy=policy,
        problems=config.problems,
        split="validation",
        chains=config.chains,
        sampling=dms_jax.Sampling(
            temperature=plan.temperature, max_new_tokens=config.max_new_tokens
        ),
        serving=Serving(lanes=plan.lanes, page_size=plan.page_size),
    )
    data = result.to_dict(problems=True, samples=0)
    kept = ("accuracy", "tasks", "peak", "reads", "compression_ratio", "per_problem")
    documents = read_documents([Paths(plan).data(config.shards - 1)])[: config.documents]
    row = {
        "trial": name,
        **record,
        **{key: data[key] for key in kept if key in data},
        "kl": distance(base, model, policy, documents),
        "kl_dense": distance(base, model, dms_jax.Vanilla(), documents),
        "seconds": time.time() - start,
        "device": jax.devices()[0].device_kind,
        **provenance(),
    }
    write_json(config.out / "recipes" / f"{name}.json", row)
    print(f"{name}: {percent(data['accuracy'])}, KL {row['kl']:.5f}", flush=True)


def distance(
    base: LanguageModel,
    model: LanguageModel,
    policy: Policy,
    documents: list[tuple[np.ndarray, int]],
) -> float:
    """Mean KL(base || model) a token of the completions, in nats, with hard decisions."""
    total, count = 0.0, 0
    documents = sorted(documents, key=lambda document: len(document[0]))
    for first in range(0, len(documents), _BATCH):
        batch = documents[first : first + _BATCH]
        length = -(-max(len(tokens) for tokens, _ in batch) // 256) * 256
        tokens = np.zeros((_BATCH, length), np.int32)
        mask = np.zeros((_BATCH, length), bool)
        for row, (ids, prompt) in enumerate(batch):
            tokens[row, : len(ids)] = ids
            mask[row, prompt - 1 : len(ids) - 1] = True
        before = base.logits(tokens, policy=dms_jax.Vanilla())
        after = model.logits(tokens, policy=policy)
        total += float(_divergence(before, after, mask))
        count += int(mask.sum())
    return total / count


@jax.jit
def _divergence(before: jax.Array, after: jax.Array, mask: jax.Array) -> jax.Array:
    before, after = jax.nn.log_softmax(before), jax.nn.log_softmax(after)
    each = jnp.sum(jnp.exp(before) * (before - after), axis=-1)
    return jnp.sum(jnp.where(mask, each, 0))


if __name__ == "__main__":
    stopped = "Stopped; the same command goes on from here."
    sys.exit(run(main, Config, description=__doc__, interrupted=stopped))
