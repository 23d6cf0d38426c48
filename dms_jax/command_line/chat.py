"""Talk with a model whose turns share one small cache: nothing of the past is recomputed.

    dms-jax chat
    dms-jax chat --model reasoner-11m-dms --temperature 0.7
    dms-jax chat --model path/to/checkpoint --system "Be brief." --policy H2O

What you type goes to the model line by line; an empty line or the end of the input (Ctrl-D) ends
the conversation, and Ctrl-C ends an answer. A checkpoint with a chat template gets messages, one
without gets the text as it is and goes on with it.
"""

import dataclasses
import pathlib
from collections.abc import Iterable, Iterator

from rich.console import Console

import dms_jax
from dms_jax.checks import Count, check
from dms_jax.command_line.generating import Generating
from dms_jax.command_line.writing import Writer
from dms_jax.generation import Completion, Update
from dms_jax.generation.requests import Prompt
from dms_jax.training.display import short


@dataclasses.dataclass(frozen=True)
class Config(Generating):
    """Talk with a model whose turns share one small cache."""

    system: str | None = None
    """What the model is told before the first turn; needs a chat template."""
    max_tokens: int | None = None
    """Tokens of all turns together; the model's positions unless given."""


def main(config: Config, lines: Iterable[str] | None = None) -> list[Completion]:
    """Answers lines until one is empty; returns the answers.

    Args:
      config: the settings.
      lines: what is said; what is typed unless given.
    """
    console = Console(highlight=False)
    # First: a model takes long to load, and nobody is asked for a line that is not answered.
    config.make_policy()
    sampling = config.make_sampling()
    max_tokens = check("--max-tokens", config.max_tokens, Count | None)
    cache = config.cache()
    model = config.load()
    policy = config.make_policy(model)
    talk = dms_jax.Conversation(model, policy, max_tokens=max_tokens, **cache)
    templated = model.tokenizer is not None and model.tokenizer.chat_template is not None
    if config.system is not None and not templated:
        raise dms_jax.ConfigError("--system: the checkpoint has no chat template.")
    console.print(
        f"{pathlib.PurePath(config.model).name} with {short(policy or model.policy)}. An empty "
        "line or Ctrl-D ends the conversation, Ctrl-C an answer.",
        style="dim",
        markup=False,
    )
    for line in typed(console) if lines is None else lines:
        if not line:
            break
        prompt: Prompt = line
        if templated:
            first = config.system is not None and not talk.turns
            system = [{"role": "system", "content": config.system}] if first else []
            prompt = [*system, {"role": "user", "content": line}]
        seed = config.seed + len(talk.turns)
        answer(console, talk, prompt, dataclasses.replace(sampling, seed=seed))
    return talk.turns


def answer(
    console: Console, talk: dms_jax.Conversation, prompt: Prompt, sampling: dms_jax.Sampling
) -> None:
    """Shows an answer as it is written, and what the cache holds after it."""
    writer = Writer(console)

    def show(update: Update) -> None:
        writer.write(update.text, last=update.finished)

    try:
        usage = talk.say(prompt, sampling=sampling, on_tokens=show).usage
    except KeyboardInterrupt:
        console.print("\nCut off; the conversation is as it was before.", style="dim")
        return
    console.print(
        f"{usage.live_tokens:,.0f} live tokens, {usage.compression_ratio:.1f} times fewer than "
        f"were seen; {usage.cache_bytes / 1e3:,.0f} kB",
        style="dim",
    )


def typed(console: Console) -> Iterator[str]:
    """Lines as they are typed, until the input ends."""
    while True:
        try:
            yield console.input("> " if console.is_terminal else "")
        except EOFError:
            return
