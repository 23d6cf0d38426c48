"""Every cache policy on one checkpoint and one text, decoded token by token from the real cache.

Text that nobody trained on goes through the paged cache under every policy at several compression
ratios; the learned ones (DMS, DMC, grouped-query attention) are first retrofitted on the same
tokens. What is compared is measured, not nominal: live tokens, reads, peak and bytes. With
`--tasks` the model's answers are scored as well.

    python experiments/compare_policies.py                    # stories260K, its stories, a CPU
    python experiments/compare_policies.py --model reasoner-11m --tasks reasoning retrieval
    python experiments/compare_policies.py --speed            # ms a step at 32K context, a GPU

Rows are written as they come. Several processes can share the work (`--only`), each with a folder
of its own; `--join` makes one table of their folders.
"""

import dataclasses
import datetime
import json
import pathlib
import platform
import shlex
import sys
import time
from collections.abc import Iterator
from typing import Any, Literal

import jax
import tyro
from comparison.lessons import Lessons, grouped, merged, sparsified
from comparison.measure import Bench, Measured, Questions, Text
from comparison.page import write_page
from comparison.show import picture, show
from comparison.speed import compare_speed
from comparison.systems import System, combined, learned, training_free
from comparison.texts import OCCASIONS, occasions, packed, solved
from rich.console import Console

import dms_jax
from dms_jax import assets
from dms_jax.data import Documents
from dms_jax.data.mixture import Mixture, standard_parts

SHIPPED = ("stories260k", "reasoner-11m")


@dataclasses.dataclass(frozen=True)
class Config:
    """Compare every cache policy on one checkpoint."""

    model: str = "stories260k"
    """Hugging Face directory or hub id, or a model that ships: stories260k, reasoner-11m."""
    text: pathlib.Path | None = None
    """Text to decode, of which the learned systems see nothing. Unless given: stories, or for
    reasoner-11m problems of the validation split with their solutions."""
    ratios: tuple[float, ...] = (2.0, 3.0, 4.0, 8.0)
    """Compression ratios, in the order in which they are measured."""
    sequences: int = 24
    """How many sequences of the text."""
    length: int = 512
    """Tokens of each, of stories and files."""
    page_size: int = 16
    """Tokens a page; 16 as in Quest."""
    only: tuple[str, ...] = ()
    """Labels to run beside dense; all unless given."""
    learn: tuple[str, ...] = ("DMS", "DMC", "GQA")
    """What to retrofit; --learn with nothing leaves --checkpoints alone."""
    merge: bool = False
    """Add to the rows that the results hold already, or put new ones in their places."""
    join: tuple[pathlib.Path, ...] = ()
    """Folders of other runs over the same text and problems: one table, nothing measured."""
    deadline_minutes: float = 1e6
    """No row is begun later than this after the start."""

    lessons: str = ""
    """What the learned systems read: stories, or mixture (that of reasoner-11m, its default)."""
    steps: int = 280
    """Optimizer steps of each learned system."""
    batch_size: int = 4
    """Sequences a step."""
    sequence_length: int = 512
    """Tokens of each."""
    learning_rate: float = 1e-4
    """Of DMS, all weights."""
    adapter_learning_rate: float = 3e-4
    """Of its adapter."""
    dmc_learning_rate: float = 7e-4
    """Of DMC."""
    dmc_neuron: Literal["first", "last"] = "first"
    """Which neuron of a head DMC borrows."""
    dmc_offset: float = 2.0
    """What the neuron must exceed; 5 in the paper. That and the next: `recipes.dmc_quickstart`."""
    dmc_temperature: float = 0.3
    """Of DMC's relaxation; 0.1 in the paper."""
    dmc_weight: float = 2.0
    """Of the loss that makes DMC merge, beside distillation; where merging costs much, more."""
    gqa_learning_rate: float = 1e-3
    """Of uptraining, falling to nothing."""
    weight_decay: float = 0.0
    """Of all three."""
    window: int = 32
    """Of DMS."""
    shift: int = 1
    """Of DMS."""
    dmc_ratios: tuple[float, ...] = (2.0, 4.0)
    """Of DMC, each a run of its own."""
    workers: int = 2
    """Processes that make a mixture."""
    checkpoints: tuple[str, ...] = ()
    """More learned systems, as label=directory or label@ratio=directory."""

    tasks: tuple[str, ...] = ()
    """Problems to answer besides: reasoning, retrieval (those of the first curve)."""
    problems: int = 128
    """Of each task; reasoning has three, retrieval two."""
    temperature: float = 0.7
    """Of the answers; 0 takes the most likely token."""
    max_new_tokens: int = 700
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
    """Of training, and of the answers."""
    out: pathlib.Path = pathlib.Path("experiments/results/compare_policies")
    """Folder for quality.json, quality.png and tables.md, or speed.json."""

    def __post_init__(self):
        if not self.ratios or min(self.ratios) <= 1:
            raise dms_jax.ConfigError("--ratios are numbers above 1, at least one of them.")
        for name in ("sequences", "problems", "steps", "batch_size", "workers"):
            if getattr(self, name) < 1:
                raise dms_jax.ConfigError(f"--{name.replace('_', '-')} must be at least 1.")
        if unknown := set(self.learn) - {"DMS", "DMC", "GQA"}:
            raise dms_jax.ConfigError(f"--learn {' '.join(sorted(unknown))}: DMS, DMC and GQA can.")
        if self.lessons not in ("", "stories", "mixture"):
            raise dms_jax.ConfigError("--lessons are stories or a mixture.")
        occasions(self.tasks)


def load(config: Config) -> dms_jax.LanguageModel:
    """The base model."""
    path = assets.path(config.model) if config.model in SHIPPED else config.model
    return dms_jax.load(str(path))


def read_text(config: Config, model: dms_jax.LanguageModel) -> Text:
    """What is decoded."""
    if config.text is None and config.model == "reasoner-11m":
        every = [task for each in occasions(tuple(OCCASIONS)).values() for task in each.tasks]
        return solved(model, every, config.sequences)
    return packed(model, config.text, sequences=config.sequences, length=config.length)


def read_lessons(config: Config, model: dms_jax.LanguageModel) -> Lessons:
    """What the learned systems are trained on."""
    length = min(config.sequence_length, model.config.max_position_embeddings)
    if (config.lessons or config.model) in ("mixture", "reasoner-11m"):
        # Solutions slip like those that the model was last trained on.
        data: Any = Mixture(
            model.tokenizer,
            standard_parts(slips=0.2),
            batch_size=config.batch_size,
            length=length,
            seed=config.seed,
        )
    else:
        data = Documents(assets.stories("train"))
    named = {field.name for field in dataclasses.fields(Lessons)} - {"data", "sequence_length"}
    options = {name: getattr(config, name) for name in named}
    return Lessons(data, sequence_length=length, **options)


def learned_systems(config: Config, model: dms_jax.LanguageModel, tell: Any) -> Iterator[System]:
    """Trained here, or brought along; each is trained when its turn has come."""
    lessons = read_lessons(config, model)

    def wanted(label: str) -> bool:
        own = [one for one in config.only if one.partition(" + ")[0] == label]
        return label in config.learn and bool(own or not config.only)

    if wanted("DMS"):
        dms = dms_jax.DMS(window=config.window, source="adapter", shift=config.shift)
        systems = list(sparsified(model, dms, config.ratios, lessons, tell))
        yield from systems
        for system in systems:
            yield from combined(system)
    for ratio in config.dmc_ratios if wanted("DMC") else ():
        yield from merged(model, ratio, lessons, tell)
    for ratio in config.ratios if wanted("GQA") else ():
        yield from grouped(model, ratio, lessons, tell)
    for entry in config.checkpoints:
        name, _, path = entry.partition("=")
        label, _, ratio = name.partition("@")
        yield learned(label, float(ratio or 1), dms_jax.load(path))


def all_systems(config: Config, model: dms_jax.LanguageModel, tell: Any) -> Iterator[System]:
    """Every row, dense first."""
    dense = System("dense", 1.0, model, lambda share: dms_jax.Vanilla())
    yield dense
    yield dataclasses.replace(dense, label="float8", kv_dtype="float8_e4m3")
    for ratio in config.ratios:
        yield from training_free(model, ratio)
    yield from learned_systems(config, model, tell)


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
    part = path.with_name(f"{name}.part")
    part.write_text(json.dumps(report | content, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def read_rows(path: pathlib.Path, tokens: int) -> dict[str, Measured]:
    """Rows of another run over the same text, by name."""
    report = json.loads(path.read_text(encoding="utf-8"))
    if report["tokens"] != tokens:
        sys.exit(f"{path} was measured on {report['tokens']:,} tokens, not {tokens:,}.")
    rows = [Measured(**row) for row in report["rows"]]
    return {row.name: row for row in rows}


def write_rows(
    config: Config, rows: dict[str, Measured], tokens: int, more: dict[str, Any] | None = None
) -> None:
    """Writes quality.json."""
    content = [dataclasses.asdict(row) for row in rows.values()]
    write(config, "quality.json", {"tokens": tokens} | (more or {}) | {"rows": content})


def join(config: Config) -> dict[str, Measured]:
    """The rows of several runs; of those that have the same name the first that did not fail."""
    reports = [json.loads((folder / "quality.json").read_text()) for folder in config.join]
    rows: dict[str, Measured] = {}
    for folder in config.join:
        for name, row in read_rows(folder / "quality.json", reports[0]["tokens"]).items():
            if name not in rows or rows[name].failed is not None:
                rows[name] = row
    places = ("command", "date", "device", "versions", "config")
    runs = [{place: report[place] for place in places} for report in reports]
    first = {place: reports[0][place] for place in ("date", "device", "versions", "config")}
    write_rows(config, rows, reports[0]["tokens"], first | {"runs": runs})
    return rows


def measure(config: Config, tell: Any) -> dict[str, Measured]:
    """Runs the comparison."""
    end = time.monotonic() + 60 * config.deadline_minutes
    model = load(config)
    questions = None
    if config.tasks:
        sampling = dms_jax.Sampling(
            temperature=config.temperature, max_new_tokens=config.max_new_tokens
        )
        questions = Questions(occasions(config.tasks), config.problems, sampling, config.seed)
    bench = Bench(read_text(config, model), page_size=config.page_size, questions=questions)
    tokens, rows = bench.text.tokens, {}
    if config.merge and (config.out / "quality.json").exists():
        rows = read_rows(config.out / "quality.json", tokens)
    for system in all_systems(config, model, tell):
        if config.only and system.label not in ("dense", *config.only):
            continue
        if time.monotonic() > end:
            tell("The time is over.")
            break
        row = bench.run(system)
        tell(row.summary)
        rows[row.name] = row
        write_rows(config, rows, tokens)
        if bench.lost:
            tell("The device gave up. Start again with --only for the rows that are left.")
            break
    return rows


def main(config: Config) -> list[Any]:
    """Runs or joins comparisons and returns the rows."""
    console = Console() if Console().is_terminal else Console(width=120)

    def tell(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

    if config.speed:
        return compare_speed(config, tell, lambda rows: write(config, "speed.json", rows))
    rows = list((join(config) if config.join else measure(config, tell)).values())
    show(console, rows)
    picture(config.out / "quality.png", rows, title=f"{config.model}: every cache policy")
    write_page(config.out / "tables.md", rows)
    return rows


if __name__ == "__main__":
    try:
        main(tyro.cli(Config, description=__doc__))
    except dms_jax.DmsJaxError as error:
        sys.exit(f"{type(error).__name__}: {error}")
