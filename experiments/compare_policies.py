"""Every cache policy on one checkpoint and one text, decoded token by token from the real cache.

Text that nobody trained on goes through the paged cache under every policy at several compression
ratios; the learned ones (DMS, DMC, grouped-query attention) are first retrofitted on the same
tokens. What is compared is measured, not nominal: live tokens, reads, peak and bytes. With a task
(`--task`) the model's answers are scored as well.

    python experiments/compare_policies.py                    # stories260K, its stories, a CPU
    python experiments/compare_policies.py --model path --text file.txt --checkpoints DMS=runs/dms8
    python experiments/compare_policies.py --speed            # ms a step at 32K context, a GPU
"""

import dataclasses
import datetime
import json
import pathlib
import platform
import shlex
import sys
from typing import Any

import jax
import numpy as np
import tyro
from comparison.measure import Bench, Measured
from comparison.show import picture, show
from comparison.speed import compare_speed
from comparison.systems import (
    Lessons,
    System,
    combined,
    grouped,
    merged,
    sparsified,
    training_free,
)
from options import read_tasks
from rich.console import Console

import dms_jax
from dms_jax import assets
from dms_jax.data import Documents


@dataclasses.dataclass(frozen=True)
class Config:
    """Compare every cache policy on one checkpoint."""

    model: str = "stories260k"
    """Hugging Face directory or hub id; stories260k is the model that ships with the library."""
    text: pathlib.Path | None = None
    """Text to decode, of which the learned systems see nothing; stories unless given."""
    ratios: tuple[float, ...] = (2.0, 3.0, 4.0, 8.0)
    """Compression ratios."""
    sequences: int = 24
    """How many sequences of the text."""
    length: int = 512
    """Tokens of each."""
    page_size: int = 16
    """Tokens a page; 16 as in Quest."""
    only: tuple[str, ...] = ()
    """Labels to run; all unless given."""
    learn: tuple[str, ...] = ("DMS", "DMC", "GQA")
    """What to retrofit on the shipped stories; --learn with nothing leaves --checkpoints alone."""
    merge: bool = False
    """Add to the rows that the results hold already, or put new ones in their places."""
    steps: int = 280
    """Optimizer steps of each learned system."""
    window: int = 32
    """Of DMS."""
    dmc_ratios: tuple[float, ...] = (2.0, 4.0)
    """Of DMC, each a run of its own."""
    checkpoints: tuple[str, ...] = ()
    """More learned systems, as label=directory or label@ratio=directory."""
    task: str | None = None
    """Also answer the problems of a task (see evaluate.py)."""
    task_options: tuple[str, ...] = ()
    """Of the task."""
    problems: int = 200
    """Of the task."""
    max_new_tokens: int = 256
    """Longest answer."""
    speed: bool = False
    """Time decode steps with random weights instead."""
    shape: str = "llama-3.1-8b"
    """Model shape of --speed: llama-3.1-8b, llama-3.2-1b, qwen3-8b, tiny."""
    context: int = 32768
    """Tokens that each sequence of --speed has seen."""
    batch: int = 8
    """Sequences of --speed."""
    seed: int = 0
    """Of training."""
    out: pathlib.Path = pathlib.Path("experiments/results/compare_policies")
    """Folder for quality.json and quality.png, or speed.json."""


def load(config: Config) -> dms_jax.LanguageModel:
    """The base model."""
    path = assets.path("stories260k") if config.model == "stories260k" else config.model
    return dms_jax.load(str(path))


def read_text(config: Config, model: dms_jax.LanguageModel) -> np.ndarray:
    """[sequences, length] tokens of the text, packed end to end."""
    if config.text is None:
        documents = assets.stories("valid")
    else:
        documents = [config.text.read_text(encoding="utf-8")]
    tokens = [token for text in documents for token in model.tokenizer.encode(text)]
    wanted = config.sequences * config.length
    if len(tokens) < wanted:
        sys.exit(f"The text has {len(tokens):,} tokens; {wanted:,} were asked for.")
    return np.asarray(tokens[:wanted], np.int32).reshape(config.sequences, config.length)


def learned_systems(config: Config, model: dms_jax.LanguageModel, tell: Any) -> list[System]:
    """Trained here, or brought along."""
    systems: list[System] = []
    if config.learn:
        lessons = Lessons(
            Documents(assets.stories("train")),
            steps=config.steps,
            sequence_length=min(512, model.config.max_position_embeddings),
            seed=config.seed,
        )
        dms = dms_jax.DMS(window=config.window, source="adapter")
        if "DMS" in config.learn:
            systems += sparsified(model, dms, config.ratios, lessons, tell)
        for ratio in config.dmc_ratios if "DMC" in config.learn else ():
            systems += merged(model, ratio, lessons, tell)
        for ratio in config.ratios if "GQA" in config.learn else ():
            systems += grouped(model, ratio, lessons, tell)
    for entry in config.checkpoints:
        name, _, path = entry.partition("=")
        label, _, ratio = name.partition("@")
        checkpoint = dms_jax.load(path)
        systems.append(System(label, float(ratio or 1), checkpoint, checkpoint.policy))
    return systems


def all_systems(config: Config, model: dms_jax.LanguageModel, tell: Any) -> list[System]:
    """Every row, dense first."""
    dense = System("dense", 1.0, model, dms_jax.Vanilla())
    systems = [dense, dataclasses.replace(dense, label="float8", kv_dtype="float8_e4m3")]
    learned = learned_systems(config, model, tell)
    for ratio in config.ratios:
        systems += training_free(model, ratio, config.length)
    for system in learned:
        systems.append(system)
        if system.label == "DMS":
            systems += combined(system, config.length)
    kept = [one for one in systems if one.label == "dense" or one.label in config.only]
    return kept if config.only else systems


def write(config: Config, name: str, content: dict[str, Any]) -> None:
    """Writes a JSON file with where and when it was measured."""
    config.out.mkdir(parents=True, exist_ok=True)
    report = {
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.date.today().isoformat(),
        "device": f"{jax.devices()[0].device_kind} ({platform.machine()})",
        "versions": {"python": platform.python_version(), "jax": jax.__version__},
        "config": {
            field.name: str(getattr(config, field.name)) for field in dataclasses.fields(config)
        },
    }
    path = config.out / name
    path.write_text(json.dumps(report | content, indent=1) + "\n", encoding="utf-8")


def read_rows(config: Config, tokens: int) -> dict[str, Measured]:
    """Rows of an earlier run over the same text, by name."""
    path = config.out / "quality.json"
    if not config.merge or not path.exists():
        return {}
    report = json.loads(path.read_text(encoding="utf-8"))
    if report["tokens"] != tokens:
        sys.exit(f"{path} was measured on {report['tokens']:,} tokens, not {tokens:,}.")
    rows = [Measured(**row) for row in report["rows"]]
    return {row.name: row for row in rows}


def main(config: Config) -> list[Any]:
    """Runs the comparison and returns its rows."""
    console = Console() if Console().is_terminal else Console(width=120)

    def tell(text: str) -> None:
        console.print(text, highlight=False)

    if config.speed:
        rows = compare_speed(config, tell, lambda rows: write(config, "speed.json", rows))
        return rows
    model = load(config)
    tasks = None if config.task is None else read_tasks(config.task, config.task_options)
    bench = Bench(
        read_text(config, model),
        page_size=config.page_size,
        tasks=tasks,
        problems=config.problems,
        max_new_tokens=config.max_new_tokens,
    )
    earlier = read_rows(config, bench.tokens)
    systems = all_systems(config, model, tell)
    for number, system in enumerate(systems, start=1):
        row = bench.run(system)
        tell(f"{number}/{len(systems)} {row.summary}")
        earlier[row.name] = row
        rows = list(earlier.values())
        content = [dataclasses.asdict(row) for row in rows]
        write(config, "quality.json", {"tokens": bench.tokens, "rows": content})
    show(console, rows)
    picture(config.out / "quality.png", rows, title=f"{config.model}: every cache policy")
    return rows


if __name__ == "__main__":
    try:
        main(tyro.cli(Config, description=__doc__))
    except dms_jax.DmsJaxError as error:
        sys.exit(f"{type(error).__name__}: {error}")
