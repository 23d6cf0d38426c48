"""Encodes problems as prompts: as plain text, or through the model's chat template.

In a chat every worked example is a user turn and an assistant turn, after the system prompt, and
the problem is the last user turn. If a problem provides the beginning of its answer, that starts
the last assistant turn. In plain text the examples precede the problem, separated by empty lines.
"""

import dataclasses
from collections.abc import Mapping

from dms_jax.checkpoint.tokenizer import Tokenizer
from dms_jax.checks import Options
from dms_jax.data.tasks import Problem, Task
from dms_jax.errors import DataError
from dms_jax.evaluation.tasks.ruler import RULER
from dms_jax.generation.requests import Request, encode_prompt
from dms_jax.model.language_model import LanguageModel
from dms_jax.model.template_variables import check_template_variables

SEPARATOR = "\n\n"  # between worked examples in plain text


@dataclasses.dataclass(frozen=True)
class Chat(Options):
    """Options of a chat prompt.

    Attributes:
      system: the system prompt; None for the template's default.
      variables: other variables of the template: {"enable_thinking": False} for Qwen3,
        {"date_string": "23 July 2024"} for Llama 3 as in the DMS paper.
    """

    system: str | None = None
    variables: Mapping = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "variables", dict(self.variables))
        check_template_variables("Chat", self.variables)


def encode_problem(
    model: LanguageModel, problem: Problem, chat: Chat | None, *, name: str
) -> list[int]:
    """Token ids of a problem.

    Args:
      model: the model, with its tokenizer and chat template.
      problem: the problem, with its worked examples and the beginning of its answer if it has any.
      chat: options of the chat; None for plain text.
      name: name of the task, for messages.

    Raises:
      DataError: the model has no chat template, or its positions do not hold the tokens.
    """
    text = prompt_text(model.tokenizer, problem, chat, name=name)
    if chat is None:
        return encode_prompt(model, text, name=f"A problem of {name}")
    tokens = model.tokenizer.encode(text, add_special_tokens=False)
    return encode_prompt(model, tokens, name=f"A problem of {name}")


def prompt_text(
    tokenizer: Tokenizer | None, problem: Problem, chat: Chat | None, *, name: str
) -> str:
    """The text of a problem as the model reads it; see `encode_problem`.

    Raises:
      DataError: there is no chat template.
    """
    if chat is None:
        texts = [*map("".join, problem.examples), problem.prompt]
        return SEPARATOR.join(texts) + problem.answer_prefix
    if tokenizer is None or getattr(tokenizer, "chat_template", None) is None:
        raise DataError(
            f"{name}: chat prompts were requested, and the model's tokenizer has no chat template. "
            "Leave `chat` out to ask in plain text, or add a chat_template to "
            "tokenizer_config.json."
        )
    messages = [] if chat.system is None else [{"role": "system", "content": chat.system}]
    for question, answer in problem.examples:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer.strip()})
    messages.append({"role": "user", "content": problem.prompt})
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, **chat.variables)
    return text + problem.answer_prefix


def answer_limit(problem: Problem, most: int) -> int:
    """The most tokens of an answer that a problem allows, at most `most`."""
    return most if problem.answer_tokens is None else min(problem.answer_tokens, most)


def limit_answer(request: Request, problem: Problem) -> None:
    """Shortens the longest answer of a request to what its problem allows."""
    limit = answer_limit(problem, request.max_new_tokens)
    if limit < request.max_new_tokens:
        request.max_length -= request.max_new_tokens - limit
        request.max_new_tokens = limit


def fit_task(model: LanguageModel, task: Task, chat: Chat | None = None) -> Task:
    """The task, with lengths measured in tokens of the model if it has a length.

    Raises:
      DataError: the model has no tokenizer.
    """
    if not isinstance(task, RULER):
        return task
    if model.tokenizer is None:
        raise DataError(f"{task.name} has a length in tokens, and this model has no tokenizer.")
    return task.fitted(PromptLength(model.tokenizer, chat, task.name))


@dataclasses.dataclass(frozen=True)
class PromptLength:
    """Counts the tokens of a problem as the model reads it.

    Attributes:
      tokenizer: the model's tokenizer.
      chat: options of the chat; None for plain text.
      name: name of the task, for messages.
    """

    tokenizer: Tokenizer
    chat: Chat | None
    name: str

    def __call__(self, problem: Problem) -> int:
        text = prompt_text(self.tokenizer, problem, self.chat, name=self.name)
        return len(self.tokenizer.encode(text, add_special_tokens=self.chat is None))

    def __hash__(self) -> int:  # the variables of a chat have none
        return hash((id(self.tokenizer), self.name))
