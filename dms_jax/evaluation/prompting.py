"""Encodes problems as prompts: as plain text, or through the model's chat template.

In a chat every worked example is a user turn and an assistant turn, after the system prompt, and
the problem is the last user turn. In plain text the examples precede the problem, separated by
empty lines.
"""

import dataclasses
from collections.abc import Mapping

from dms_jax.checks import Options
from dms_jax.data.tasks import Problem
from dms_jax.errors import ConfigError, DataError
from dms_jax.evaluation.tasks.files import FileProblem
from dms_jax.generation.prompts import encode_prompt
from dms_jax.model.language_model import LanguageModel

SEPARATOR = "\n\n"  # between worked examples in plain text


@dataclasses.dataclass(frozen=True)
class Chat(Options):
    """Options of a chat prompt.

    Attributes:
      system: the system prompt; None for the default of the template, if it has one.
      variables: further variables of the template: {"enable_thinking": False} for Qwen3,
        {"date_string": "23 July 2024"} for Llama 3 as in the DMS paper.
    """

    system: str | None = None
    variables: Mapping = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "variables", dict(self.variables))
        if taken := {"messages", "add_generation_prompt"} & self.variables.keys():
            raise ConfigError(
                f"Chat: {', '.join(sorted(taken))} comes from the problem and cannot be given in "
                "variables."
            )


def encode_problem(
    model: LanguageModel, problem: Problem, chat: Chat | None, *, name: str
) -> list[int]:
    """Token ids of a problem.

    Args:
      model: the model, with its tokenizer and chat template.
      problem: the problem, with its worked examples if it has any.
      chat: options of the chat; None for plain text.
      name: name of the task, for messages.

    Raises:
      DataError: the model has no chat template, or the tokens do not fit it.
    """
    examples = problem.examples if isinstance(problem, FileProblem) else ()
    if chat is None:
        text = SEPARATOR.join([*map("".join, examples), problem.prompt])
        return encode_prompt(model, text, name=f"A problem of {name}")
    if getattr(model.tokenizer, "chat_template", None) is None:
        raise DataError(
            f"{name}: chat prompts were requested, and the model's tokenizer has no chat template. "
            "Leave chat out for plain text prompts, or set model.tokenizer.chat_template."
        )
    messages = [] if chat.system is None else [{"role": "system", "content": chat.system}]
    for question, answer in examples:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer.strip()})
    messages.append({"role": "user", "content": problem.prompt})
    text = model.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, **chat.variables
    )
    tokens = model.tokenizer.encode(text, add_special_tokens=False)
    return encode_prompt(model, tokens, name=f"A problem of {name}")
