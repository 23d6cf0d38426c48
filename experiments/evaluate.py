"""Let a model answer the problems of a task from a small cache, and score the answers.

    python -m experiments.evaluate --task reasoning --chains 16
    python -m experiments.evaluate --model path/to/model --task needle --task-options size=600 \
        --policy TOVA --options budget=128 --out runs/needle.json

Problems are made from seeds; those of the test split are never trained on.
"""

import dataclasses
import datetime
import inspect
import pathlib
import sys
from importlib import metadata
from typing import Any, Literal

import jax

import dms_jax
from dms_jax import assets
from dms_jax.data.tasks import Split
from dms_jax.evaluation import SAMPLING, Result, evaluate, summary_table
from experiments.shared.command_line import command, run
from experiments.shared.options import read_policy, read_tasks
from experiments.shared.reports import make_place, write_json

CALL = {name: each.default for name, each in inspect.signature(evaluate).parameters.items()}


@dataclasses.dataclass(frozen=True)
class Config:
    """Let a model answer the problems of a task from a small cache, and score the answers."""

    model: str = ""
    """Hugging Face directory, GGUF file or hub id ("owner/name"); the shipped reasoning model
    unless given."""
    adapter: str | None = None
    """Directory of an adapter that was trained on the model."""
    task: str = "reasoning"
    """linear, arithmetic, words, needle, tracking, or reasoning: the first three in turn."""
    task_options: tuple[str, ...] = ()
    """Difficulty and length of the task, as name=value or as one JSON object."""
    policy: str | None = None
    """Cache policy by name; the one that the checkpoint declares unless given."""
    options: tuple[str, ...] = ()
    """Options of the policy, as name=value (window=256) or as one JSON object."""
    problems: int = CALL["problems"]
    """How many."""
    chains: int = CALL["chains"]
    """Answers to each problem; more than one are also put to the vote."""
    split: Split = CALL["split"]
    """Which problems."""
    temperature: float = SAMPLING.temperature
    """0 takes the most likely token."""
    max_new_tokens: int = SAMPLING.max_new_tokens
    """Longest answer; the model's positions may end it earlier."""
    seed: int = CALL["seed"]
    """Of the draws."""
    lanes: int = CALL["lanes"]
    """Sequences in the cache at a time."""
    page_size: int = CALL["page_size"]
    """Tokens a page of the cache; 16 for Quest as published."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type of the weights and the cache; that of the files unless given."""
    samples: int = 3
    """Completions to keep in the file."""
    out: pathlib.Path | None = None
    """JSON file for the figures, with device, versions, date and command."""

    def make_sampling(self) -> dms_jax.Sampling:
        """How answers are drawn."""
        return dms_jax.Sampling(temperature=self.temperature, max_new_tokens=self.max_new_tokens)


def main(config: Config) -> Result:
    """Evaluates, prints the table, writes the file."""
    if config.out is not None:
        make_place("--out", config.out)
    path = config.model or assets.path("reasoner-11m")
    model = dms_jax.load(path, dtype=config.dtype, adapter=config.adapter)
    result = evaluate(
        model,
        read_tasks(config.task, config.task_options),
        policy=read_policy(config.policy, config.options),
        problems=config.problems,
        split=config.split,
        chains=config.chains,
        sampling=config.make_sampling(),
        seed=config.seed,
        lanes=config.lanes,
        page_size=config.page_size,
    )
    data = result.to_dict(samples=config.samples)
    rows = [{"label": config.task, **data}]
    if len(result.tasks) > 1:
        rows += [{"label": name, **result.of_task(name).to_dict()} for name in result.tasks]
    print(summary_table(rows))
    rate = float(result.new_tokens.sum()) / result.seconds
    print(
        f"\n{data['policy']['name']}: {result.seconds:.1f} s with compilation, {rate:,.0f} tokens/s"
        "\nIn percent, ± one standard error clustered by problem. peak, reads: tokens of all chains"
        "\nof a problem, averages over layers and heads. ratio: tokens seen over live ones."
    )
    if config.out is not None:
        write_json(config.out, {**provenance(), "model": config.model or "reasoner-11m", **data})
    return result


def provenance() -> dict[str, Any]:
    """Where, when and how figures were taken."""
    return {
        "device": jax.devices()[0].device_kind,
        "versions": {name: metadata.version(name) for name in ("jax", "jaxlib", "flax")},
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "command": command(),
    }


if __name__ == "__main__":
    sys.exit(run(main, Config, description=__doc__))
