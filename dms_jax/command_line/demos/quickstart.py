"""Retrofit a small pretrained Llama, then decode from a small cache.

Takes two to three minutes on two CPU cores. stories260K (a Llama of 260,032 parameters that ships
with the library) first decodes held-out stories with its whole cache, then learns Dynamic Memory
Sparsification on a megabyte of others. Then the held-out text goes token by token through the paged
cache: under DMS at two ratios, and for comparison under policies that need no training, at equal
live tokens (StreamingLLM, TOVA, random eviction) and at equal reads (StreamingLLM). Everything in
the table is measured.

    dms-jax demo --only quickstart
"""

import dataclasses
import itertools
import math
import pathlib
import time
from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

import dms_jax
from dms_jax import assets
from dms_jax.checks import Count, Range, Whole, check
from dms_jax.command_line.reports import make_folder, provenance, write_json
from dms_jax.data import Documents
from dms_jax.evaluation import standard_error
from dms_jax.training import Recipe, recipes

LENGTH = 512  # tokens per sequence: the model's positions
ROWS = 9  # of the table
PAGE_SIZE = 16  # tokens
EARLY_RATIO = 4.0  # intermediate ratio at which the model is measured too


@dataclasses.dataclass(frozen=True)
class Config:
    """Retrofit stories260K with DMS and decode from a small cache."""

    out: pathlib.Path = pathlib.Path("runs/quickstart")
    """Folder for results.json."""
    sequences: int = 64
    """Held-out sequences of 512 tokens to decode; 64 make 32,704 predicted tokens."""
    window: int = 32
    """Window of the retrofit: number of recent tokens that always stay."""
    steps_per_ratio: int = 12
    """Training steps per unit of compression ratio."""
    ratio: float = 10.5
    """Target compression ratio of the retrofit; the reached one is measured."""
    seed: int = 0
    """Seed of the order of the data and of the noise of training."""

    def __post_init__(self):
        check("--quickstart.seed", self.seed, Whole)
        self.make_policy()
        self.make_recipe()

    def make_policy(self) -> dms_jax.DMS:
        """Returns the policy to retrofit for."""
        return dms_jax.DMS(window=self.window, source="adapter")

    def make_recipe(self) -> Recipe:
        """Returns the recipe, which also keeps the models at lower ratios.

        Raises:
          ConfigError: the ratio is below that of the first model, or a number is malformed.
        """
        ratio = check("--quickstart.ratio", self.ratio, Annotated[float, Range(EARLY_RATIO)])
        stops = {EARLY_RATIO, *map(float, range(2, math.ceil(ratio), 2))}
        steps = check("--quickstart.steps-per-ratio", self.steps_per_ratio, Count)
        return recipes.dms_quickstart(ratio, steps_per_ratio=steps, snapshots=tuple(sorted(stops)))


@dataclasses.dataclass(frozen=True)
class Row:
    """A policy, measured over all sequences.

    `increase` is relative to dense on the same tokens, and its error is that of the paired
    difference. With a single sequence errors are unknown: NaN.
    """

    label: str
    method: str
    policy: dict[str, Any]
    nats: float
    error: float
    increase: float
    increase_error: float
    peak_tokens: float
    reads: float
    peak_ratio: float
    reads_ratio: float
    cache_bytes: int
    seconds: float


class Bench:
    """Decodes the held-out sequences under each policy."""

    def __init__(self, sequences: np.ndarray, page_size: int, report: Callable[[Row], None]):
        self.sequences, self.page_size, self.report = sequences, page_size, report
        self.rows: list[Row] = []
        self._dense_losses = np.zeros(len(sequences))

    def run(
        self, label: str, method: str, model: dms_jax.LanguageModel, policy: dms_jax.policies.Policy
    ) -> Row:
        """Scores every sequence token by token through the cache."""
        start = time.perf_counter()
        scores = dms_jax.score(
            model, self.sequences.tolist(), policy=policy, page_size=self.page_size
        )
        seconds = time.perf_counter() - start
        losses = np.array([-score.logprobs.mean() for score in scores])
        if not self.rows:
            self._dense_losses = losses
        increases = losses - self._dense_losses
        peak = float(np.mean([score.usage.peak_tokens for score in scores]))
        reads = float(np.mean([score.usage.kv_reads for score in scores]))
        dense = self.rows[0] if self.rows else None
        row = Row(
            label=label,
            method=method,
            policy=policy.to_dict(),
            nats=float(losses.mean()),
            error=standard_error(losses),
            increase=float(increases.mean()),
            increase_error=standard_error(increases),
            peak_tokens=peak,
            reads=reads,
            peak_ratio=dense.peak_tokens / peak if dense else 1.0,
            reads_ratio=dense.reads / reads if dense else 1.0,
            cache_bytes=sum(score.usage.cache_bytes for score in scores),
            seconds=seconds,
        )
        self.rows.append(row)
        self.report(row)
        return row


def held_out(model: dms_jax.LanguageModel, count: int) -> np.ndarray:
    """Returns [count, 512] tokens of held-out stories, packed end to end."""
    stream = [token for story in assets.stories("valid") for token in model.tokenizer.encode(story)]
    available = len(stream) // LENGTH
    if not 1 <= count <= available:
        raise dms_jax.ConfigError(
            f"--quickstart.sequences: the held-out text makes 1 to {available} sequences, not "
            f"{count}."
        )
    return np.asarray(stream[: count * LENGTH], np.int32).reshape(count, LENGTH)


def random_rate(peak: float, window: int, tokens: int) -> float:
    """Returns the eviction rate past the window that leaves `peak` of `tokens` tokens live."""
    far = max(tokens - window - 1, 1)
    return float(np.clip(1 - (peak - window - 1) / far, 0, 1))


def streaming_budget_for_reads(reads: float, tokens: int) -> int:
    """Returns the budget whose reads, sum over t of min(t, budget), are closest to `reads`."""
    budgets = np.arange(5, tokens + 1)
    totals = budgets * (budgets + 1) / 2 + (tokens - budgets) * budgets
    return int(budgets[np.abs(totals - reads).argmin()])


def compare_windows(bench: Bench, base: dms_jax.LanguageModel, row: Row) -> None:
    """Runs a plain window at a DMS row's number of live tokens, and at its number of reads."""
    peak = max(round(row.peak_tokens), 6)
    budget = streaming_budget_for_reads(row.reads, LENGTH - 1)
    for label, tokens in (("equal peak", peak), ("equal reads", budget)):
        policy = dms_jax.StreamingLLM(budget=tokens)
        bench.run(f"  StreamingLLM, {label}", "StreamingLLM", base, policy)


def compare_choices(bench: Bench, base: dms_jax.LanguageModel, row: Row, window: int) -> None:
    """Runs two other choices for comparison with a DMS row: by attention, and at random."""
    peak = max(round(row.peak_tokens), 6)
    bench.run("  TOVA, equal peak", "TOVA", base, dms_jax.TOVA(budget=peak - 1))
    rate = random_rate(row.peak_tokens, window, LENGTH - 1)
    bench.run(
        "  random, equal peak",
        "random",
        base,
        dms_jax.RandomEviction(window=window, rate=rate),
    )


def retrofit(
    config: Config, base: dms_jax.LanguageModel, tell: Callable[[str], None]
) -> tuple[dms_jax.LanguageModel, dms_jax.LanguageModel, float]:
    """Trains a DMS model; returns it, the one at EARLY_RATIO, and the training time."""
    on_the_way: dict[float, dms_jax.LanguageModel] = {}
    start = time.perf_counter()

    def keep(ratio: float, model: dms_jax.LanguageModel) -> None:
        on_the_way[ratio] = model
        tell(f"  ratio {ratio:g} after {time.perf_counter() - start:.0f} s")

    model = dms_jax.retrofit(
        base,
        config.make_policy(),
        recipe=config.make_recipe(),
        data=Documents(assets.stories("train")),
        seed=config.seed,
        on_snapshot=keep,
    )
    return model, on_the_way[EARLY_RATIO], time.perf_counter() - start


def show(console: Console, rows: list[Row]) -> None:
    """Prints the table, in 80 columns, and conclusions."""
    title = "Held-out text, decoded token by token from the paged cache"
    table = Table(title=title, box=SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("cache", no_wrap=True)
    for name in ("above dense", "peak", "fewer", "reads", "fewer"):
        table.add_column(name, justify="right", no_wrap=True)
    for index, row in enumerate(rows):
        dense = row.method == "dense"
        known = not math.isnan(row.increase_error)
        increase = f"{row.increase:.4f} ±{f'{row.increase_error:.4f}' if known else 'unknown'}"
        table.add_row(
            row.label,
            f"(loss {row.nats:.4f})" if dense else increase,
            f"{row.peak_tokens:.0f}",
            "" if dense else f"{row.peak_ratio:.1f}x",
            f"{row.reads:,.0f}",
            "" if dense else f"{row.reads_ratio:.1f}x",
            style="bold" if row.method in ("DMS", "dense") else "",
            end_section=index + 1 < len(rows) and rows[index + 1].method == "DMS",
        )
    console.print(table)
    console.print(
        "above dense: loss in nats a token, ± one standard error of the difference over\n"
        "sequences. peak: most live tokens of a sequence; reads: cache entries read for\n"
        "one; both averaged over layers and heads, and how many times fewer than dense.\n",
        highlight=False,
    )
    window_wins = False
    for index, row in enumerate(rows):
        rivals = list(itertools.takewhile(lambda rival: rival.method != "DMS", rows[index + 1 :]))
        if row.method != "DMS" or not rivals:
            continue
        console.print(f"{row.label} ({row.increase:+.4f}), against", highlight=False)
        for rival in rivals:
            console.print(f"  {rival.label}: {verdict(row, rival)}", highlight=False)
            window_wins |= rival.method == "StreamingLLM" and "worse" in verdict(row, rival)
    if window_wins:
        console.print(
            "\nWhere a plain window (StreamingLLM) does better: this model is tiny and makes\n"
            "little use of what lies further back than such a window.",
            highlight=False,
        )


def verdict(row: Row, rival: Row) -> str:
    """Says which of two rows is better, if the difference exceeds two standard errors."""
    gap = rival.increase - row.increase
    error = float(np.hypot(row.increase_error, rival.increase_error))
    if math.isnan(error):
        return f"{rival.increase:+.4f}, of which a single sequence decides nothing"
    if abs(gap) <= 2 * error:
        return f"{rival.increase:+.4f}, no difference beyond the error"
    return (
        f"{rival.increase:+.4f}, {'DMS is better' if gap > 0 else 'DMS is worse'} by {abs(gap):.4f}"
    )


def tell_a_story(console: Console, model: dms_jax.LanguageModel) -> None:
    """Generates a new story from the compressed cache."""
    prompt = "Once upon a time, there was a little dog who"
    console.print(f"\n[bold]A new story from the compressed cache[/bold]\n{prompt} ...")

    out = dms_jax.generate(
        model,
        [prompt],
        sampling=dms_jax.Sampling(temperature=0.7, top_p=0.9, max_new_tokens=300, seed=3),
        page_size=PAGE_SIZE,
    )
    console.print(out.texts[0], markup=False, highlight=False)
    usage = out.usage
    console.print(
        f"\n{usage.prompt_tokens + usage.new_tokens} tokens, {usage.live_tokens:.0f} live at the "
        f"end: {usage.compression_ratio:.1f} times fewer; {usage.cache_bytes / 1e3:.0f} kB."
    )


def main(config: Config) -> list[Row]:
    """Runs the whole demonstration and returns the table."""
    start = time.perf_counter()
    console = Console(highlight=False)
    make_folder("--quickstart.out", config.out)
    base = dms_jax.load(str(assets.path("stories260k")))
    sequences = held_out(base, config.sequences)
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    rows = progress.add_task("decoding", total=ROWS)

    def report(row: Row) -> None:
        said = f"{row.nats:.4f} nats a token, {row.peak_tokens:.0f} live tokens"
        console.print(f"  {row.label.strip()}: {said}, {row.seconds:.0f} s")
        progress.advance(rows)

    bench = Bench(sequences, PAGE_SIZE, report)
    count = sequences.shape[0] * (LENGTH - 1)
    console.print(
        f"[bold]1. Decode[/bold] {count:,} held-out tokens, each from the whole cache so far\n"
        "  (every new kind of step is compiled first, a few seconds each)"
    )
    with progress:
        bench.run("dense", "dense", base, dms_jax.Vanilla())
    console.print(
        f"[bold]2. Retrofit[/bold] to compression ratio {config.ratio:g}, window {config.window}: "
        "one to two minutes"
    )
    # Use print: the retrofit's bar moves below printed lines; another console would write into it.
    model, early, seconds = retrofit(config, base, print)
    console.print("[bold]3. Decode[/bold] the same tokens from small caches")
    progress.reset(rows, completed=len(bench.rows))  # exclude the retrofit from the time estimate
    with progress:
        row = bench.run(f"DMS, trained to ratio {EARLY_RATIO:g}", "DMS", early, early.policy)
        compare_windows(bench, base, row)
        row = bench.run(f"DMS, trained to ratio {config.ratio:g}", "DMS", model, model.policy)
        compare_windows(bench, base, row)
        compare_choices(bench, base, row, config.window)

    show(console, bench.rows)
    tell_a_story(console, model)
    results = provenance(config) | {
        "held_out_tokens": count,
        "training_seconds": seconds,
        "total_seconds": time.perf_counter() - start,
        "rows": [dataclasses.asdict(row) for row in bench.rows],
    }
    write_json(config.out / "results.json", results)
    console.print(
        f"Training {seconds:.0f} s, this part {results['total_seconds']:.0f} s. Figures:\n"
        f"  {config.out / 'results.json'}\n"
    )
    return bench.rows
