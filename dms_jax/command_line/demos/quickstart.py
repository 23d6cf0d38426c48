"""Retrofit a small pretrained Llama, then decode from a small cache.

Takes two to three minutes on two CPU cores. stories260K (a Llama of 260,032 parameters that ships
with the library) first decodes held-out stories with its whole cache, then learns Dynamic Memory
Sparsification on a megabyte of others. Then the held-out text goes token by token through the paged
cache: under DMS at two ratios, and for comparison under policies that need no training, at as many
live tokens. Everything in the table is measured.

    dms-jax demo --only quickstart
"""

import dataclasses
import math
import pathlib
import time
from collections.abc import Callable
from typing import Annotated

import numpy as np
from rich.console import Console

import dms_jax
from dms_jax import assets
from dms_jax.checks import Count, Range, Whole, check
from dms_jax.command_line.candidates import change, show
from dms_jax.command_line.reports import make_folder, provenance, write_json
from dms_jax.data import Documents
from dms_jax.evaluation import Perplexity
from dms_jax.evaluation.progress import progress_bar
from dms_jax.training import Recipe, recipes

LENGTH = 512  # tokens per sequence: the model's positions
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


class Bench:
    """Decodes the held-out sequences under each policy; `results` has the figures by label."""

    def __init__(self, sequences: np.ndarray):
        self.sequences, self.results = sequences.tolist(), dict[str, Perplexity]()

    def run(
        self, label: str, model: dms_jax.LanguageModel, policy: dms_jax.policies.Policy
    ) -> Perplexity:
        """Scores every sequence token by token through the cache."""
        start = time.perf_counter()
        with progress_bar(len(self.sequences), title=label, shown=True) as tick:
            scores = dms_jax.score(
                model, self.sequences, policy=policy, page_size=PAGE_SIZE, on_done=tick
            )
        settings = {"policy": policy.to_dict(), "window": LENGTH}
        found = self.results[label] = Perplexity.of(scores, settings)
        seconds = time.perf_counter() - start
        print(
            f"  {label}: {found.loss.value:.4f} nats a token, {found.peak:.0f} live tokens, "
            f"{seconds:.0f} s",
            flush=True,
        )
        return found

    def compare(self, ratio: float, model: dms_jax.LanguageModel, base: dms_jax.LanguageModel):
        """Runs DMS, and policies without training with as many live tokens at their peak."""
        peak = max(round(self.run(f"DMS, {ratio:g}x", model, model.policy).peak), 6)
        for policy in (dms_jax.StreamingLLM(budget=peak), dms_jax.TOVA(budget=peak - 1)):
            self.run(f"{policy.name}, {ratio:g}x", base, policy)


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


def main(config: Config) -> dict[str, Perplexity]:
    """Runs the whole demonstration and returns the rows of the table."""
    start = time.perf_counter()
    console = Console(highlight=False)
    make_folder("--quickstart.out", config.out)
    base = dms_jax.load(str(assets.path("stories260k")))
    bench = Bench(held_out(base, config.sequences))
    console.print(
        f"[bold]1. Decode[/bold] {config.sequences * (LENGTH - 1):,} held-out tokens, each from "
        "the whole cache so far\n"
        "  (every new kind of step is compiled first, a few seconds each)"
    )
    dense = bench.run("dense", base, dms_jax.Vanilla())
    console.print(
        f"[bold]2. Retrofit[/bold] to compression ratio {config.ratio:g}, window {config.window}: "
        "one to two minutes"
    )
    # Use print: the retrofit's bar moves below printed lines; another console would write into it.
    model, early, seconds = retrofit(config, base, print)
    console.print("[bold]3. Decode[/bold] the same tokens from small caches")
    bench.compare(EARLY_RATIO, early, base)
    bench.compare(config.ratio, model, base)
    show(console, bench.results, "Held-out text, decoded token by token from the paged cache")
    console.print(
        "\nStreamingLLM and TOVA hold as many tokens at their peak as DMS trained to that\n"
        "ratio. Where a plain window (StreamingLLM) comes near: this model is tiny and\n"
        "makes little use of what lies further back than such a window."
    )
    tell_a_story(console, model)
    rows = [
        {"name": name, **each.to_dict(), "change": change(each, dense).to_list()}
        for name, each in bench.results.items()
    ]
    total = time.perf_counter() - start
    results = {"training_seconds": seconds, "total_seconds": total, "rows": rows}
    write_json(config.out / "results.json", provenance(config) | results)
    console.print(
        f"Training {seconds:.0f} s, this part {total:.0f} s. Figures:\n"
        f"  {config.out / 'results.json'}\n"
    )
    return bench.results
