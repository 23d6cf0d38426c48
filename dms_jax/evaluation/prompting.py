"""From a problem to the tokens that a model reads: plain text, or a chat by the model's template.

As a chat, every worked example is a turn of the user and one of the assistant, after the system's;
the problem is the last turn. In plain text the examples stand before the problem, with an empty
line between.
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
    """Asks through the model's chat template.

    Attributes:
      system: the system prompt; None for none, or for what the template says by itself.
      variables: what the template understands besides: {"enable_thinking": False} for Qwen3,
        {"date_string": "23 July 2024"} for Llama 3 as the DMS paper ran it.
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
      model: whose tokenizer and chat template count.
      problem: the problem; one of a file may come with worked examples.
      chat: how to ask through the chat template; None for plain text.
      name: of the task, for messages.

    Raises:
      DataError: the model has no chat template, or the tokens do not fit it.
    """
    examples = problem.examples if isinstance(problem, FileProblem) else ()
    if chat is None:
        text = SEPARATOR.join([*map("".join, examples), problem.prompt])
        return encode_prompt(model, text, name=f"A problem of {name}")
    if getattr(model.tokenizer, "chat_template", None) is None:
        raise DataError(
            f"{name} is to be asked as a chat, and this model's tokenizer has no chat template. "
            "Leave chat out to ask in plain text, or set model.tokenizer.chat_template."
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
