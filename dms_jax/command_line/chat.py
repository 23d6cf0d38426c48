"""Talk with a model that keeps the conversation in a small cache.

    dms-jax chat
    dms-jax chat --model reasoner-11m-dms --temperature 0.7
    dms-jax chat --model path/to/checkpoint --system "Be brief." --policy H2O

Each line goes to the model. An empty line or the end of the input (Ctrl-D) ends the conversation,
Ctrl-C ends an answer. A checkpoint with a chat template gets messages; others continue the plain
text.

Thoughts before an answer (<think>, the channels of gpt-oss) are dimmed on a terminal and omitted
elsewhere.

A turn prefills only what follows the longest cached prefix of the conversation
(`dms_jax.generation.prefixes`). It prefills more after a thought, which chat templates drop from
earlier turns, and under policies that cut prompts, such as SnapKV; on a mesh, everything.
"""

import dataclasses
import pathlib
from collections.abc import Iterable, Iterator

from rich.console import Console

import dms_jax
from dms_jax.checks import Count, check
from dms_jax.command_line.generating import Generating
from dms_jax.command_line.writing import AnswerWriter
from dms_jax.errors import TooLongError
from dms_jax.generation import Completion, Engine, Update
from dms_jax.generation.answer_readers import PLAIN, AnswerForm
from dms_jax.generation.answers import Answer, answer_form, with_shown_markers
from dms_jax.generation.requests import Prompt, encode_prompt
from dms_jax.training.display import short


@dataclasses.dataclass(frozen=True)
class Config(Generating):
    """Talk with a model that keeps the conversation in a small cache."""

    system: str | None = None
    """System prompt; needs a chat template."""
    max_tokens: int | None = None
    """Most tokens of all turns together; by default the model's positions."""


def main(config: Config, lines: Iterable[str] | None = None) -> list[Completion]:
    """Answers lines until one is empty, and returns the answers.

    Args:
      config: the settings.
      lines: the user's turns; by default read from the keyboard.
    """
    console = Console(highlight=False)
    # Check first: loading takes long, and no line should be read that cannot be answered.
    config.make_policy()
    sampling = config.make_sampling()
    max_tokens = check("--max-tokens", config.max_tokens, Count | None)
    cache = config.cache()
    model = config.load()
    policy = config.make_policy(model)
    templated = getattr(model.tokenizer, "chat_template", None) is not None
    if templated:
        model = with_shown_markers(model)
    prefixes = None if model.mesh is not None else 0
    cache |= dict(num_lanes=1, max_tokens=max_tokens, prefix_cache=prefixes)
    engine = Engine(model, policy, **cache)
    if config.system is not None and not templated:
        raise dms_jax.ConfigError("--system: the checkpoint has no chat template.")
    console.print(
        f"{pathlib.PurePath(config.model).name} with {short(policy or model.policy)}. An empty "
        "line or Ctrl-D ends the conversation, Ctrl-C an answer.",
        style="dim",
        markup=False,
    )
    messages = [] if config.system is None else [{"role": "system", "content": config.system}]
    tokens, turns = list[int](), list[Completion]()
    for line in typed(console) if lines is None else lines:
        if not line:
            break
        if templated:
            messages.append({"role": "user", "content": line})
            form = answer_form(model.tokenizer, model.tokenizer.apply_chat_template(messages))
            prompt = list(messages)
        else:
            prompt, form = [*tokens, *encode_prompt(model, line, continuing=bool(tokens))], PLAIN
        seed = config.seed + len(turns)
        seeded = dataclasses.replace(sampling, seed=seed)
        try:
            completion = answer(console, engine, prompt, form, seeded)
        except TooLongError as error:
            if not turns:
                raise
            raise TooLongError(
                f"The conversation is full after {len(turns)} answers; start a new one. {error}"
            ) from error
        if completion is None:
            del messages[-1:]
            continue
        turns.append(completion)
        if templated:
            read = Answer.of(form, completion.text)
            thought = {"reasoning_content": read.thought} if read.thought else {}
            messages.append({"role": "assistant", "content": read.text, **thought})
        else:
            tokens = [*prompt, *completion.tokens]
    return turns


def answer(
    console: Console,
    engine: Engine,
    prompt: Prompt,
    form: AnswerForm,
    sampling: dms_jax.Sampling,
) -> Completion | None:
    """Streams an answer and shows the content of the cache after it.

    Returns:
      The answer; None if Ctrl-C cut it off.
    """
    writer = AnswerWriter(console, form)

    def show(update: Update) -> None:
        writer.write(update.text, last=update.finished)

    try:
        (completion,) = engine.generate([prompt], sampling=sampling, on_tokens=show)
    except KeyboardInterrupt:
        console.print("\nCut off; the conversation is as it was before.", style="dim")
        return None
    usage = completion.usage
    console.print(
        f"{usage.live_tokens:,.0f} live tokens, {usage.compression_ratio:.1f} times fewer than "
        f"were seen; {usage.cache_bytes / 1e3:,.0f} kB",
        style="dim",
    )
    return completion


def typed(console: Console) -> Iterator[str]:
    """Yields lines from the keyboard until the input ends."""
    while True:
        try:
            yield console.input("> " if console.is_terminal else "")
        except EOFError:
            return
