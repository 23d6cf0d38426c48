"""Every cache policy on one checkpoint and one text, decoded token by token from the real cache.

Text that nobody trained on goes through the paged cache under every policy at several compression
ratios; the learned ones (DMS, DMC, grouped-query attention) are first retrofitted on the same
tokens. What is compared is measured, not nominal: live tokens, reads, peak and bytes. With
`--tasks` the model's answers are scored as well.

    dms-jax compare                    # stories260K, its stories, a CPU
    dms-jax compare --model reasoner-11m --tasks reasoning retrieval

Rows are written as they come. Several processes can share the work (`--only`), each with a folder
of its own; `--join` makes one table of their folders.
"""

import dataclasses
import math
import pathlib
import time
from collections.abc import Iterator
from typing import Any, Literal

from rich.console import Console

import dms_jax
from dms_jax import assets
from dms_jax.checkpoint.adapter import ADAPTER_CONFIG
from dms_jax.command_line.comparison.labels import LEARNED, brought, check_labels
from dms_jax.command_line.comparison.lessons import Lessons, grouped, merged, sparsified
from dms_jax.command_line.comparison.measure import Bench, Measured, Questions, Text
from dms_jax.command_line.comparison.page import write_page
from dms_jax.command_line.comparison.runs import (
    check_answers,
    check_dense,
    check_same,
    join,
    put,
    read_report,
    write_rows,
)
from dms_jax.command_line.comparison.show import picture, show
from dms_jax.command_line.comparison.systems import (
    FEW_BITS,
    System,
    combined,
    learned,
    training_free,
)
from dms_jax.command_line.comparison.texts import OCCASIONS, occasions, packed, solved
from dms_jax.command_line.options import find_adapter
from dms_jax.command_line.reports import can_draw, make_folder, provenance
from dms_jax.data import Documents
from dms_jax.data.mixture import Mixture, standard_parts

COUNTS = (
    "sequences",
    "problems",
    "steps",
    "batch_size",
    "workers",
    "page_size",
    "max_new_tokens",
)
RATES = (
    "learning_rate",
    "adapter_learning_rate",
    "dmc_learning_rate",
    "dmc_weight",
    "gqa_learning_rate",
    "weight_decay",
)
SHIPPED = ("stories260k", "reasoner-11m")

INTERRUPTED = "Stopped. Rows that were measured are on disk; --merge --only adds others."


@dataclasses.dataclass(frozen=True)
class Config:
    """Compare every cache policy on one checkpoint."""

    model: str = "stories260k"
    """Hugging Face directory, GGUF file or hub id, or a model that ships: stories260k,
    reasoner-11m."""
    adapter: str | None = None
    """Directory of an adapter that was trained on the model, or one that ships:
    smollm2-135m-instruct-dms."""
    text: pathlib.Path | None = None
    """Text to decode, of which the learned systems see nothing. Unless given: stories, or for
    reasoner-11m problems of the validation split with their solutions."""
    ratios: tuple[float, ...] = (2.0, 3.0, 4.0, 8.0)
    """Compression ratios, in the order in which they are measured."""
    sequences: int = 24
    """Sequences of the text that are decoded under each policy."""
    length: int = 512
    """Tokens of each, of stories and files."""
    page_size: int = 16
    """Tokens a page; 16 as in Quest."""
    only: tuple[str, ...] = ()
    """Rows to measure beside dense, by the names in the table; all unless given."""
    learn: tuple[str, ...] = ("DMS", "DMC", "GQA")
    """What to retrofit; --learn with nothing after it retrofits nothing, and of learned systems
    --checkpoints alone take part."""
    merge: bool = False
    """Add to the rows that the results hold already, or put new ones in their places."""
    join: tuple[pathlib.Path, ...] = ()
    """Folders of other runs over the same text and problems: one table, nothing measured."""
    deadline_minutes: float | None = None
    """No row is begun later than this after the start; every row unless given."""

    lessons: str = ""
    """What the learned systems read: stories, or mixture (that of reasoner-11m, its default)."""
    steps: int = 280
    """Optimizer steps of each learned system."""
    batch_size: int = 4
    """Sequences of an optimizer step."""
    sequence_length: int = 512
    """Tokens of a training sequence."""
    learning_rate: float = 1e-4
    """Rate of all weights under DMS."""
    adapter_learning_rate: float = 3e-4
    """Rate of the adapter of DMS."""
    dmc_learning_rate: float = 7e-4
    """Rate of all weights under DMC."""
    dmc_neuron: Literal["first", "last"] = "first"
    """Which neuron of a head DMC borrows."""
    dmc_offset: float = 2.0
    """What the neuron must exceed; 5 in the paper. That and the next: `recipes.dmc_quickstart`."""
    dmc_temperature: float = 0.3
    """Temperature of the relaxation of DMC; 0.1 in the paper."""
    dmc_weight: float = 2.0
    """Weight of the loss that makes DMC merge; where merging costs much, more."""
    gqa_learning_rate: float = 1e-3
    """Rate of the uptraining to fewer KV heads; it falls to zero."""
    weight_decay: float = 0.0
    """Weight decay of the trainings of DMS, DMC and GQA."""
    window: int = 32
    """Tokens that DMS keeps before it evicts any (its window)."""
    shift: int = 1
    """Token t + shift decides on key t under DMS; 0 is the paper's text."""
    dmc_ratios: tuple[float, ...] = (2.0, 4.0)
    """Ratios of DMC, each a training of its own."""
    workers: int = 2
    """Processes that make a mixture."""
    save: pathlib.Path | None = None
    """Folder for what has learned, each a checkpoint called label@ratio."""
    checkpoints: tuple[str, ...] = ()
    """More learned systems, as label=directory or label@ratio=directory, of a checkpoint or of an
    adapter that was trained on the model, or ships. What --only names of label + Quest, label +
    KCache, label + float8 and label + int4 runs on them as well."""

    tasks: tuple[str, ...] = ()
    """Problems to answer besides: reasoning, retrieval."""
    problems: int = 128
    """Problems of each kind: reasoning has three kinds, retrieval two."""
    temperature: float = 0.7
    """Sampling temperature of the answers; 0 takes the most likely token."""
    max_new_tokens: int = 700
    """Most new tokens of an answer to a problem."""

    seed: int = 0
    """Seed of the trainings and of the draws of the answers."""
    out: pathlib.Path = pathlib.Path("runs/compare")
    """Folder for quality.json, quality.png and tables.md."""

    def __post_init__(self):
        for name in ("ratios", "dmc_ratios"):
            ratios = getattr(self, name)
            if not all(1 < ratio < math.inf for ratio in ratios) or len(set(ratios)) < len(ratios):
                raise dms_jax.ConfigError(f"{option(name)} are different numbers above 1.")
        if not self.ratios:
            raise dms_jax.ConfigError("--ratios wants at least one.")
        least = dict(sequence_length=2, length=2)
        for name in (*COUNTS, *least):
            if getattr(self, name) < least.get(name, 1):
                raise dms_jax.ConfigError(f"{option(name)} must be at least {least.get(name, 1)}.")
        for name in RATES:
            if not 0 <= getattr(self, name) < math.inf:
                raise dms_jax.ConfigError(f"{option(name)} must be a number of at least 0.")
        # Found now, and not when it is their turn to learn.
        dms_jax.DMS(window=self.window, shift=self.shift)
        dms_jax.DMC(offset=self.dmc_offset, temperature=self.dmc_temperature)
        if unknown := set(self.learn) - LEARNED.keys():
            raise dms_jax.ConfigError(f"--learn {' '.join(sorted(unknown))}: DMS, DMC and GQA can.")
        if self.steps < 4 and self.wants("DMC"):
            raise dms_jax.ConfigError(
                "--steps: DMC, which learns in three stages, wants 4 of them."
            )
        if self.lessons not in ("", "stories", "mixture"):
            raise dms_jax.ConfigError("--lessons are stories or a mixture.")
        if self.text is not None and not self.text.is_file():
            raise dms_jax.ConfigError(f"--text {self.text}: there is no such file.")
        occasions(self.tasks)
        brought(self.checkpoints)

    def takes(self, label: str) -> bool:
        """Whether a row, or one that comes with it, is to be measured."""
        return not self.only or any(one.partition(",")[0] == label for one in self.only)

    def wants(self, label: str) -> bool:
        """Whether something is to be retrofitted."""
        chosen = not self.only or not set(self.only).isdisjoint(LEARNED[label])
        return chosen and label in self.learn


def option(name: str) -> str:
    """A setting as it is written on a command line."""
    return f"--{name.replace('_', '-')}"


def load(config: Config, adapter: str | None) -> dms_jax.LanguageModel:
    """The base model, with an adapter if one is given."""
    path = assets.path(config.model) if config.model in SHIPPED else config.model
    return dms_jax.load(str(path), adapter=find_adapter(adapter))


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


def learned_systems(config: Config, dense: System, tell: Any) -> Iterator[System]:
    """Trained here, or brought along; each is trained when its turn has come."""
    lessons = read_lessons(config, dense.model)
    dms = dms_jax.DMS(window=config.window, source="adapter", shift=config.shift)
    if config.wants("DMS"):
        systems = list(sparsified(dense, dms, config.ratios, lessons, tell))
        yield from systems
        for system in systems:
            yield from combined(system)
    for ratio in config.dmc_ratios if config.wants("DMC") else ():
        yield from merged(dense, ratio, lessons, tell)
    groups = []
    for ratio in sorted(config.ratios) if config.wants("GQA") else ():
        for group in grouped(dense, ratio, lessons, tell):
            groups.append(group)
            yield group
        if groups and not config.takes("GQA"):
            break  # what goes on top needs no other
    for group in groups[:1]:  # the mildest one has room for more
        if config.takes("GQA + DMS"):
            yield from sparsified(group, dms, config.ratios, lessons, tell)
        for ratio in config.dmc_ratios if config.takes("GQA + DMC") else ():
            yield from merged(group, ratio, lessons, tell)
    for label, ratio, path in brought(config.checkpoints):
        if config.only and not any(f"{one} + ".startswith(f"{label} + ") for one in config.only):
            continue
        is_adapter = (pathlib.Path(path).expanduser() / ADAPTER_CONFIG).is_file()
        system = learned(label, ratio, load(config, path) if is_adapter else dms_jax.load(path))
        if config.takes(label):
            yield system
        yield from (more for more in combined(system) if more.label in config.only)


def all_systems(config: Config, model: dms_jax.LanguageModel, tell: Any) -> Iterator[System]:
    """Every row, dense first."""
    dense = System("dense", 1.0, model, lambda share: dms_jax.Vanilla())
    yield dense
    for label, kv_dtype in FEW_BITS.items():
        yield dataclasses.replace(dense, label=label, kv_dtype=kv_dtype)
    for ratio in config.ratios:
        yield from training_free(model, ratio)
    yield from learned_systems(config, dense, tell)


def in_time(systems: Iterator[System], end: float, tell: Any) -> Iterator[System]:
    """Systems until the time is over: none is trained or measured after that."""
    for system in systems:
        if time.monotonic() > end:
            break
        yield system
        if time.monotonic() > end:
            break
    else:
        return
    tell("The time is over.")


def measure(config: Config, tell: Any) -> dict[str, Measured]:
    """Runs the comparison."""
    minutes = math.inf if config.deadline_minutes is None else config.deadline_minutes
    end = time.monotonic() + 60 * minutes
    model = load(config, config.adapter)
    check_labels(config, model)
    for name, folder in (("out", config.out), ("save", config.save)):
        if folder is not None:
            make_folder(option(name), folder)
    questions = None
    if config.tasks:
        sampling = dms_jax.Sampling(
            temperature=config.temperature, max_new_tokens=config.max_new_tokens
        )
        questions = Questions(occasions(config.tasks), config.problems, sampling, config.seed)
    bench = Bench(read_text(config, model), page_size=config.page_size, questions=questions)
    tokens, rows, more = bench.text.tokens, {}, {}
    path = config.out / "quality.json"
    if config.merge and path.exists():
        before, now = read_report(path), provenance(config)
        check_same(path, before["config"], now["config"], (before["tokens"], tokens))
        asked = questions.occasions.values() if questions else ()
        check_answers(path, before["rows"], (part for each in asked for part in each.parts))
        rows = {row.name: row for row in before["rows"]}
        more = {"runs": [*before["runs"], now]}
    for system in in_time(all_systems(config, model, tell), end, tell):
        if config.only and system.label not in ("dense", *config.only):
            continue
        row = bench.run(system)
        tell(row.summary)
        if len(bench.rows) == 1 and row.failed is not None:
            raise dms_jax.ConfigError(
                "dense, with which all others are compared, could not run: " + row.failed
            )
        if len(bench.rows) == 1 and rows:
            check_dense(path, next(iter(rows.values())), row)
        put(rows, row, last=True)
        write_rows(config, rows, tokens, more)
        if bench.lost:
            tell("The device gave up. Start again with --only for the rows that are left.")
            break
    if not rows:
        raise dms_jax.ConfigError("The time was over before the first row; give more of it.")
    return rows


def main(config: Config) -> list[Any]:
    """Runs or joins comparisons and returns the rows."""
    console = Console() if Console().is_terminal else Console(width=120)

    def tell(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

    model, named = join(config) if config.join else (config.model, measure(config, tell))
    rows = list(named.values())
    show(console, rows)
    write_page(config.out / "tables.md", rows)
    tell(f"The tables are in {config.out / 'tables.md'}, the figures beside it in quality.json.")
    if can_draw(config.out / "quality.png"):
        picture(config.out / "quality.png", rows, model=model)
    return rows
