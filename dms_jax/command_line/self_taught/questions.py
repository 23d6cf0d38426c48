"""The prompts of a self-taught retrofit: questions to answer, or texts to continue.

The last `held_out` prompts of the file are for measuring; training skips copies of them. Rows of
JSON lines have

    question, answer   problems of a task, asked as it asks them, with a judge of final answers
    prompt             a text, sent as a user's message or (without a chat) continued
    messages           a conversation; the turns before the last answer are the prompt
    text               continued from its first tokens, as are texts between <|endoftext|>
"""

import dataclasses
import hashlib
import pathlib
import warnings
from collections.abc import Sequence
from typing import Any

import dms_jax
from dms_jax.command_line.reports import read_file
from dms_jax.command_line.self_taught.settings import SelfTaught
from dms_jax.data.sources import TextFiles
from dms_jax.evaluation import Chat
from dms_jax.evaluation.prompting import encode_problem
from dms_jax.evaluation.records import Record, holds_records, read_records
from dms_jax.evaluation.tasks import GSM8K, MATH500, Mathematics
from dms_jax.generation.requests import encode_prompt
from dms_jax.model.language_model import LanguageModel

_ASKING = ("messages", "prompt", "question")  # a record with one of these is no text to continue
JUDGES: dict[str, type[Mathematics]] = {task.name: task for task in (GSM8K, Mathematics, MATH500)}


@dataclasses.dataclass(frozen=True)
class Questions:
    """Prompts as token ids.

    Attributes:
      training: indices of the prompts to train on, without copies of held-out ones.
      held_out: indices of the prompts to measure with.
      tokens: token ids of each prompt, by index.
      task: the task of the problems; None if nothing judges the answers.
      chat: the chat options; None for plain text.
      fingerprint: SHA-256 of the file.
    """

    training: tuple[int, ...]
    held_out: range
    tokens: dict[int, list[int]]
    task: Mathematics | None
    chat: Chat | None
    fingerprint: str

    def scores(self, answers: Sequence[tuple[int, str]]) -> list[float]:
        """Returns the scores of answers, (index of the prompt, text) each; 0 without a judge."""
        if self.task is None:
            return [0.0] * len(answers)
        task = self.task
        return task.scores([(task.problem("train", number), text) for number, text in answers])


def read_questions(
    config: SelfTaught, model: LanguageModel, records: list[Record] | None = None
) -> Questions:
    """Encodes the prompts.

    Args:
      config: the settings.
      model: the model.
      records: the rows of --prompts, if they are read already.

    Raises:
      ConfigError: there are too few prompts, or no judge for the settings.
      DataError: the file is malformed.
    """
    records = read_prompts(config) if records is None else records
    assert config.prompts is not None
    if model.tokenizer is None:
        raise dms_jax.ConfigError(f"--model {config.model} has no tokenizer.")
    fingerprint = hashlib.sha256(read_file("--prompts", config.prompts)).hexdigest()
    chat = None if all(map(_is_text, records)) else config.make_chat(model)
    task = _task(config, records, chat)
    first_held_out = len(records) - config.held_out
    held_out = range(first_held_out, len(records))
    tokens = {number: _asked(number, records, task, model, chat, config) for number in held_out}
    # Short beginnings, and files with repetitions, produce duplicate prompts.
    known = {tuple(each) for each in tokens.values()}
    training, same = [], 0
    for number in range(first_held_out):
        if len(training) == config.questions:
            break
        own = _asked(number, records, task, model, chat, config)
        if tuple(own) in known:
            same += 1
            continue
        training.append(number)
        tokens[number] = own
    if not training:
        raise _none_left(config, records, f" ({same} of the others are the same as one of these)")
    asked_for = min(config.questions or first_held_out, first_held_out)
    if len(training) < asked_for:
        warnings.warn(
            f"{len(training)} of the {asked_for} prompts asked for are left to train on: "
            f"{same} are the same as one of the {config.held_out} that are held out.",
            stacklevel=2,
        )
    return Questions(tuple(training), held_out, tokens, task, chat, fingerprint)


def _asked(
    number: int,
    records: list[Record],
    task: Mathematics | None,
    model: LanguageModel,
    chat: Chat | None,
    config: SelfTaught,
) -> list[int]:
    """Returns the tokens of a prompt."""
    if task is None:
        return _encode(records[number], model, chat, config.beginning)
    return encode_problem(model, task.problem("train", number), chat, name=task.name)


def read_prompts(config: SelfTaught) -> list[Record]:
    """Returns the rows of --prompts; checks all that needs no model.

    Raises:
      ConfigError: there are too few, or the judge has nothing to go by.
      DataError: the file is missing or malformed.
    """
    if config.prompts is None:
        raise dms_jax.ConfigError("give --model and --prompts.")
    records = _records(config.prompts)
    _check_chat(config, records)
    _judge(config, records)
    if len(records) <= config.held_out:
        raise _none_left(config, records)
    return records


def _records(path: pathlib.Path) -> list[Record]:
    if holds_records(path):
        return list(read_records(path))
    source = TextFiles(path)
    return [Record({"text": source[index]}, source.where(index)) for index in range(len(source))]


def _none_left(config: SelfTaught, records: list[Record], also: str = "") -> dms_jax.ConfigError:
    return dms_jax.ConfigError(
        f"--prompts {config.prompts} holds {len(records)} prompts, of which --held-out "
        f"{config.held_out} leaves none to train on{also}. Give more prompts, or --held-out fewer."
    )


def _check_chat(config: SelfTaught, records: list[Record]) -> None:
    """Raises ConfigError if options of a chat are given, and a record is a text to continue."""
    options = {
        "--chat yes": config.chat == "yes",
        "--system": config.system is not None,
        "--template": bool(config.template),
    }
    option = next((option for option, given in options.items() if given), None)
    text = next(filter(_is_text, records), None)
    if option is not None and text is not None:
        raise dms_jax.ConfigError(
            f"{option} is for questions, and {text.where} is a text, which is continued: leave it "
            'out, or ask in rows with a "prompt".'
        )


def _is_text(record: Record) -> bool:
    """Whether a record is a text to continue."""
    return "text" in record.fields and record.fields.keys().isdisjoint(_ASKING)


def _judge(config: SelfTaught, records: list[Record]) -> str:
    """Returns the name of the judge, or "none"."""
    name = config.judge
    if name == "auto":
        answer = records[0].fields.get("answer")
        graded = "question" in records[0].fields and isinstance(answer, str) and "####" in answer
        name = "gsm8k" if graded else "none"
    if name == "none":
        if config.keep == "correct":
            raise dms_jax.ConfigError(
                "--keep correct needs a judge, and these prompts have none: give --judge, or "
                "prompts with answers."
            )
        if config.style != "auto":
            raise dms_jax.ConfigError(
                f"--style {config.style} is of problems that a judge knows, and these prompts are "
                "plain: give --judge, or leave it out."
            )
    return name


def _task(config: SelfTaught, records: list[Record], chat: Chat | None) -> Mathematics | None:
    name = _judge(config, records)
    if name == "none":
        return None
    assert config.prompts is not None
    style: Any = config.style
    if style == "auto":
        style = "plain" if chat is None else "instruct"
    return JUDGES[name](path=config.prompts, style=style)


def _encode(record: Record, model: LanguageModel, chat: Chat | None, beginning: int) -> list[int]:
    fields = record.fields
    if "messages" in fields:
        messages = _turns(record, "messages")
        while messages and messages[-1].get("role") == "assistant":
            messages = messages[:-1]
        return _of_chat(model, messages, chat or Chat(), record)
    if "prompt" in fields and isinstance(fields["prompt"], list):
        return _of_chat(model, _turns(record, "prompt"), chat or Chat(), record)
    if _is_text(record):
        tokens = model.tokenizer.encode(record.text("text"))[:beginning]
        return encode_prompt(model, tokens, name=record.where)
    text = record.text("prompt", "question", "problem")
    if chat is None:
        return encode_prompt(model, text, name=record.where)
    return _of_chat(model, [{"role": "user", "content": text}], chat, record)


def _turns(record: Record, field: str) -> list[dict[str, Any]]:
    turns = record.fields[field]
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise record.error(
            f'"{field}" must be a list of messages ({{"role": ..., "content": ...}}).'
        )
    return turns


def _of_chat(
    model: LanguageModel, messages: list[dict[str, Any]], chat: Chat, record: Record
) -> list[int]:
    if not messages:
        raise record.error("there is no turn to answer.")
    if chat.system is not None and messages[0].get("role") != "system":
        messages = [{"role": "system", "content": chat.system}, *messages]
    try:
        text = model.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, **chat.variables
        )
    except dms_jax.DataError as error:
        raise record.error(str(error)) from error
    tokens = model.tokenizer.encode(text, add_special_tokens=False)
    return encode_prompt(model, tokens, name=record.where)
