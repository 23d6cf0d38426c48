r"""Complete prompts from a small cache, streamed, and show the cache use of each answer.

    dms-jax generate "Once upon a time"
    dms-jax generate "Lily and Tom" --policy TOVA --options budget=64
    dms-jax generate "Prove that ..." --model path/to/model --chat --samples 4
    dms-jax generate "Hi" --model nvidia/Qwen3-8B-DMS-8x --chat \
        --template enable_thinking=true
    dms-jax generate --file prompts.txt --policy TOVA --options '{"budget": 64}'

Prompts come first: --options, --template and --stop take all words up to the next option.

Thoughts before an answer (<think>, the channels of gpt-oss) are dimmed on a terminal and omitted
from a file or a pipe.
"""

import collections
import dataclasses
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

import tyro
from rich.console import Console
from rich.style import Style
from rich.table import Table

import dms_jax
from dms_jax.cache.quantization import stored_vector
from dms_jax.command_line.generating import Generating
from dms_jax.command_line.writing import AnswerWriter, stream_text
from dms_jax.generation import Generation, Update
from dms_jax.generation.answer_readers import PLAIN, AnswerForm
from dms_jax.generation.answers import answer_form, with_shown_markers
from dms_jax.generation.requests import Prompt, is_chat
from dms_jax.policies import Policy, Vanilla
from dms_jax.policies.periodic_eviction import AnswerEviction, PeriodicEviction
from dms_jax.policies.selective import SelectiveReading
from pallas_kernels import serving

INTERRUPTED = "\ninterrupted"
SIZES = {"peak": "peak_tokens", "held": "peak_held_tokens", "live": "live_tokens"}


@dataclasses.dataclass(frozen=True)
class Config(Generating):
    """Complete prompts from a small cache, streamed, and show the cache use of each answer."""

    prompts: tyro.conf.Positional[tuple[str, ...]] = ()
    """Prompts: texts to complete, or messages to answer (--chat)."""
    file: pathlib.Path | None = None
    """A file of more prompts, one a line; empty lines are skipped."""
    chat: bool = False
    """Send each prompt as a user's message through the chat template. This is the default if the
    checkpoint has one."""
    plain: bool = False
    """Use each prompt as plain text, even if the checkpoint has a chat template."""
    samples: int = 1
    """Answers to each prompt; they differ unless the temperature is 0."""


def read_prompts(config: Config) -> list[str]:
    """Returns the prompts of the command line and of --file."""
    prompts = list(config.prompts)
    if config.file is not None:
        try:
            text = config.file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise dms_jax.DataError(f"--file {config.file} cannot be read: {error}") from error
        prompts += [line for line in text.splitlines() if line.strip()]
    if not prompts:
        raise dms_jax.DataError(
            'There is no prompt; give one: dms-jax generate "Once upon a time". It comes before '
            "--options, --template and --stop, which take every word up to the next option."
        )
    return prompts


def as_prompts(config: Config, texts: list[str], model: dms_jax.LanguageModel) -> list[Prompt]:
    """Returns texts, or messages if there is a chat template; says so unless --chat asked."""
    has_template = model.tokenizer is not None and model.tokenizer.chat_template is not None
    if config.plain or not (config.chat or has_template):
        return list(texts)
    if not config.chat:
        print(
            "Each prompt is a user's message in the chat template (--plain: plain text).",
            file=sys.stderr,
        )
    return [[{"role": "user", "content": text}] for text in texts]


class Screen:
    """Shows answers: a single one streamed, several ones each when it ends.

    Args:
      console: where to write.
      prompts: the prompts.
      forms: how thoughts are marked in each answer.
      continues: whether answers go on in the line in which a prompt ends.
    """

    def __init__(
        self,
        console: Console,
        prompts: Sequence[str],
        forms: Sequence[AnswerForm],
        *,
        continues: bool,
    ):
        self._console, self._prompts, self._forms = console, prompts, forms
        self._continues = continues
        self._texts: dict[int, str] = collections.defaultdict(str)
        self._alone: AnswerWriter | None = None

    def __call__(self, update: Update) -> None:
        if len(self._prompts) == 1:
            if self._alone is None:  # not earlier, so that an error gets its own line
                self._alone = self._begin(0)
            self._alone.write(update.text, last=update.finished)
            return
        self._texts[update.index] += update.text
        if update.finished:
            self._console.rule(f"{update.index}", align="left")
            self._begin(update.index).write(self._texts[update.index], last=True)

    def _begin(self, index: int) -> AnswerWriter:
        """Shows a prompt; returns the writer of the answer."""
        end = "" if self._continues else "\n"
        stream_text(self._console, self._prompts[index] + end, Style(bold=True))
        return AnswerWriter(self._console, self._forms[index])


def sizes_to_show(generation: Generation) -> dict[str, str]:
    """Returns columns of the table and their field of `Usage`; one if all have the same figures."""
    for each in generation.completions:
        if len({f"{getattr(each.usage, field):,.0f}" for field in SIZES.values()}) > 1:
            return SIZES
    return {"peak": SIZES["peak"]}


def usage_table(generation: Generation, policy: str, seconds: float) -> Table:
    """Returns a table of the cache use of each answer."""
    table = Table(title=f"{policy}: {seconds:.1f} s with compilation")
    sizes = sizes_to_show(generation)
    for name in ("#", "ended by"):
        table.add_column(name)
    for name in ("prompt", "new", "KV reads", *sizes, "ratio", "cache kB"):
        table.add_column(name, justify="right")

    def row(label: str, reason: str, usage: Any) -> None:
        table.add_row(
            label,
            reason,
            f"{usage.prompt_tokens:,}",
            f"{usage.new_tokens:,}",
            f"{usage.kv_reads:,.0f}",
            *(f"{getattr(usage, field):,.0f}" for field in sizes.values()),
            f"{usage.compression_ratio:.2f}",
            f"{usage.cache_bytes / 1e3:,.0f}",
        )

    for index, completion in enumerate(generation.completions):
        row(str(index), completion.finish_reason, completion.usage)
    if len(generation.completions) > 1:
        table.add_section()
        row("all", "", generation.usage)
    return table


def nothing_left(policy: Policy, generation: Generation) -> str | None:
    """Returns advice if a policy that should drop tokens dropped none, otherwise None."""
    usage = generation.usage
    if isinstance(policy, Vanilla | SelectiveReading) or usage.compression_ratio > 1:
        return None
    if isinstance(policy, PeriodicEviction):
        prompt = "" if isinstance(policy, AnswerEviction) else "after the prompt and "
        when = f"rows are cut {prompt}every {policy.cut_interval} tokens of an answer"
        if policy.cut_interval is None:
            when = "rows are cut once, after the prompt"
        return (
            f"{policy.name} dropped nothing: {when}, and no row was above its budget then. Give a "
            "smaller interval, or a smaller budget."
        )
    return f"{policy.name} dropped nothing: no row came to hold more than it keeps."


def main(config: Config) -> Generation:
    """Loads the model, completes the prompts and shows the answers."""
    console = Console()
    texts = read_prompts(config)
    config.make_policy()  # checked before a model is loaded
    sampling = config.make_sampling()
    if config.plain and (config.chat or config.template):
        raise dms_jax.ConfigError("--plain leaves out what --chat and --template are for.")
    if config.samples < 1:
        raise dms_jax.ConfigError(f"--samples must be at least 1, got {config.samples}.")
    texts = [text for text in texts for _ in range(config.samples)]
    cache = config.cache()
    model = config.load()
    prompts, policy = as_prompts(config, texts, model), config.make_policy(model)
    forms = [PLAIN] * len(prompts)
    if is_chat(prompts[0]) and model.tokenizer is not None:
        model = with_shown_markers(model)
        template = model.tokenizer.apply_chat_template
        forms = [answer_form(model.tokenizer, template(prompt)) for prompt in prompts]
    start = time.perf_counter()
    generation = dms_jax.generate(
        model,
        prompts,
        policy=policy,
        sampling=sampling,
        **cache,
        on_tokens=Screen(console, texts, forms, continues=not is_chat(prompts[0])),
    )
    seconds = time.perf_counter() - start
    name = (policy or model.policy).name
    console.print()
    console.print(usage_table(generation, name, seconds))
    config_of = model.config
    if hint := nothing_left(policy or model.policy, generation):
        console.print(hint, highlight=False)
    stored, _ = stored_vector(config_of.head_dim, model.dtype, config.kv_dtype)
    decoding, _ = serving(
        head_dim=config_of.head_dim,
        group=config_of.num_heads // config_of.num_kv_heads,
        page_size=config.page_size,
        dtype=model.dtype,
        pages_dtype=stored.dtype,
    )
    told = "peak: the most entries in the cache at any time; as many are left at the end."
    if len(sizes_to_show(generation)) > 1:
        told = (
            "peak: the most entries in the cache at any time. held: the same, with those of a "
            "prompt that are read before they are dropped. live: entries left at the end."
        )
    console.print(
        f"KV reads: entries read by the decode steps. {told}\n"
        "All are averages over layers and heads. ratio: tokens seen over live ones.\n"
        f"cache kB: whole pages, of {config.page_size} tokens each, and the policy's state.\n"
        f"Attention in {decoding}."
    )
    return generation
