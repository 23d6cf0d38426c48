"""Complete prompts from a small cache, as they are written, with what each of them used.

python -m experiments.generate "Once upon a time"
python -m experiments.generate --policy TOVA --options budget=64 --temperature 0 "Lily and Tom"
python -m experiments.generate --model path/to/checkpoint --chat --samples 4 "Prove that ..."
python -m experiments.generate --file prompts.txt --options '{"budget": 64}' --policy TOVA
"""

import collections
import dataclasses
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any, Literal

import tyro
from rich.console import Console
from rich.table import Table

import dms_jax
from dms_jax import assets
from dms_jax.generation import Generation, Update
from experiments.shared.options import read_policy

SHIPPED = "stories260k"


@dataclasses.dataclass(frozen=True)
class Config:
    """Complete prompts from a small cache, as they are written, and show what each of them used.

    For example: generate.py "Once upon a time" --policy TOVA --options budget=64
    """

    prompts: tyro.conf.Positional[tuple[str, ...]] = ()
    """What to complete; each is a sequence of its own."""
    file: pathlib.Path | None = None
    """More prompts, one a line; empty lines are left out."""
    model: str = SHIPPED
    """A Hugging Face directory, a hub id (owner/name), or the small model that is shipped."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type of the weights and the cache; that of the files unless given."""
    policy: str | None = None
    """Cache policy by name (Vanilla, DMS, DMC, TOVA, Quest, StreamingLLM, RandomEviction); the one
    that the checkpoint declares unless given."""
    options: tuple[str, ...] = ()
    """Options of the policy, as name=value (window=256) or as one JSON object."""
    chat: bool = False
    """Write each prompt as a user's message, with the checkpoint's chat template."""
    samples: int = 1
    """Answers to each prompt; they differ unless the temperature is 0."""
    temperature: float = 0.8
    """0 takes the most likely token; below 1 is bolder about likely ones."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 0.95
    """Keep the most likely tokens until their probability reaches this."""
    min_p: float = 0.0
    """Keep tokens at least this many times as likely as the most likely one."""
    max_new_tokens: int = 256
    """Longest answer; the model's positions may end it earlier."""
    stop: tuple[str, ...] = ()
    """Strings that end an answer; they are cut off."""
    seed: int = 0
    """Of the draws."""
    memory_gb: float | None = None
    """Gigabytes for the cache; what the prompts can need, within the free memory, unless given."""
    page_size: int = 64
    """Tokens a page of the cache; 16 for Quest as published."""
    chunk: int = 32
    """Decode steps per compiled program: text arrives this often."""


def read_prompts(config: Config) -> list[str]:
    """The prompts of the command line and of the file."""
    prompts = list(config.prompts)
    if config.file is not None:
        try:
            text = config.file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise dms_jax.DataError(f"--file {config.file} cannot be read: {error}") from error
        prompts += [line for line in text.splitlines() if line.strip()]
    if not prompts:
        raise dms_jax.DataError('There is no prompt; give one: generate.py "Once upon a time".')
    return prompts


class Screen:
    """Shows answers: a single one as it is written, several as each is done."""

    def __init__(self, console: Console, prompts: Sequence[str]):
        self._console, self._prompts = console, prompts
        self._texts: dict[int, str] = collections.defaultdict(str)
        self._alone = len(prompts) == 1
        if self._alone:
            self._console.print(prompts[0], style="bold", markup=False, highlight=False)

    def __call__(self, update: Update) -> None:
        if self._alone:
            self._console.print(update.text, end="", markup=False, highlight=False)
            return
        self._texts[update.index] += update.text
        if update.finished:
            self._console.rule(f"{update.index}", align="left")
            self._console.print(
                self._prompts[update.index], style="bold", markup=False, highlight=False
            )
            self._console.print(self._texts[update.index], markup=False, highlight=False)


def usage_table(generation: Generation, policy: str, seconds: float) -> Table:
    """What each answer used of the cache."""
    table = Table(
        title=f"{policy}: {generation.usage.new_tokens / seconds:,.0f} tokens a second, "
        f"{seconds:.1f} s with compilation"
    )
    for name in ("#", "ended by"):
        table.add_column(name)
    for name in ("prompt", "new", "KV reads", "peak", "held", "live", "ratio", "cache kB"):
        table.add_column(name, justify="right")

    def row(label: str, reason: str, usage: Any) -> None:
        table.add_row(
            label,
            reason,
            f"{usage.prompt_tokens:,}",
            f"{usage.new_tokens:,}",
            f"{usage.kv_reads:,.0f}",
            f"{usage.peak_tokens:,.0f}",
            f"{usage.peak_held_tokens:,.0f}",
            f"{usage.live_tokens:,.0f}",
            f"{usage.compression_ratio:.2f}",
            f"{usage.cache_bytes / 1e3:,.0f}",
        )

    for index, completion in enumerate(generation.completions):
        row(str(index), completion.finish_reason, completion.usage)
    if len(generation.completions) > 1:
        table.add_section()
        row("all", "", generation.usage)
    return table


def run(config: Config, console: Console) -> Generation:
    """Loads the model, completes the prompts and shows them."""
    texts = read_prompts(config)
    policy = read_policy(config.policy, config.options)
    sampling = dms_jax.Sampling(
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        min_p=config.min_p,
        max_new_tokens=config.max_new_tokens,
        stop=config.stop,
        seed=config.seed,
    )
    if config.samples < 1:
        raise dms_jax.ConfigError(f"--samples must be at least 1, got {config.samples}.")
    path = assets.path(SHIPPED) if config.model == SHIPPED else config.model
    model = dms_jax.load(path, dtype=config.dtype)
    texts = [text for text in texts for _ in range(config.samples)]
    prompts = [[{"role": "user", "content": text}] if config.chat else text for text in texts]
    start = time.perf_counter()
    generation = dms_jax.generate(
        model,
        prompts,
        policy=policy,
        sampling=sampling,
        memory=None if config.memory_gb is None else config.memory_gb * 1e9,
        chunk=config.chunk,
        page_size=config.page_size,
        on_tokens=Screen(console, texts),
    )
    seconds = time.perf_counter() - start
    name = (policy or model.policy).name
    console.print("\n")
    console.print(usage_table(generation, name, seconds))
    console.print(
        "KV reads: entries read by the decode steps. peak, live: entries in the cache, at most and "
        "at the end.\nAll are averages over layers and heads. ratio: tokens seen over live entries."
    )
    return generation


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; 0 if all went well, 2 for what the user can mend."""
    config = tyro.cli(Config, args=arguments)
    console = Console()
    try:
        run(config, console)
    except dms_jax.DmsJaxError as error:
        Console(stderr=True).print(f"\n[red]error:[/red] {type(error).__name__}: ", end="")
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
