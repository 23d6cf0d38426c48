"""Parses the text of an answer into thoughts, content, and tool calls."""

import dataclasses
from collections.abc import Mapping

from dms_jax.checkpoint.tokenizer import Tokenizer
from dms_jax.generation.answer_readers import (
    THINKING_MARKERS,
    AnswerForm,
    AnswerReader,
    Arguments,
    CallStart,
    Piece,
    Text,
    Tool,
)
from dms_jax.generation.call_formats import FORMATS, format_of
from dms_jax.model.language_model import LanguageModel


def answer_form(
    tokenizer: Tokenizer,
    prompt: str,
    call_format: str | None = None,
    *,
    tools: tuple[Tool, ...] = (),
    parallel: bool = True,
) -> AnswerForm:
    """Returns how the answer to a prompt is parsed.

    Args:
      tokenizer: the tokenizer, whose chat template has the markers of thoughts.
      prompt: the rendered conversation.
      call_format: name of the model's call format; None if unknown.
      tools, parallel: see `AnswerForm`.
    """
    template = template_text(tokenizer.chat_template)
    if _in_channels(template, call_format):
        return AnswerForm("channels", calls="harmony", tools=tools, parallel=False)
    markers = next((each for each in THINKING_MARKERS if each[1] in template), None)
    thinks = "no"
    if markers is not None:
        end = prompt.rstrip()
        thinks = "yes" if end.endswith(markers[0]) else "perhaps"
        thinks = "no" if end.endswith(markers[1]) else thinks
    return AnswerForm(
        thinks=thinks,
        markers=markers or THINKING_MARKERS[0],
        calls=call_format if tools else None,
        tools=tools,
        parallel=parallel,
    )


def with_shown_markers(model: LanguageModel, call_format: str | None = None) -> LanguageModel:
    """Returns the model with a tokenizer that keeps the markers of thoughts and calls in texts.

    Args:
      model: the model.
      call_format: name of its call format, if tools may be offered and it is known.
    """
    if model.tokenizer is None:
        return model
    if _in_channels(template_text(model.tokenizer.chat_template), call_format):
        call_format = "harmony"
    calls = () if call_format is None else FORMATS[call_format].shown
    texts = (*(text for pair in THINKING_MARKERS for text in pair), *calls)
    return dataclasses.replace(model, tokenizer=model.tokenizer.with_shown(texts))


def template_text(template: str | Mapping[str, str] | None) -> str:
    """Returns the source of a chat template; of several, all of them."""
    if template is None or isinstance(template, str):
        return template or ""
    return "\n".join(template.values())


def _in_channels(template: str, call_format: str | None) -> bool:
    """Whether answers are messages in channels (harmony)."""
    return (call_format or format_of(template, "")) == "harmony"


def make_reader(form: AnswerForm) -> AnswerReader:
    """Returns a reader of one answer."""
    return AnswerReader(form) if form.calls is None else FORMATS[form.calls].reader(form)


@dataclasses.dataclass
class Call:
    """A call of a function: its id, the function, and the JSON text of its arguments."""

    id: str
    name: str
    arguments: str = ""


@dataclasses.dataclass
class Answer:
    """A whole answer, from its pieces.

    Attributes:
      thought: its thoughts.
      text: its content.
      calls: its tool calls.
    """

    thought: str = ""
    text: str = ""
    calls: list[Call] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, form: AnswerForm, text: str) -> "Answer":
        """Parses the text of a whole answer."""
        reader, answer = make_reader(form), cls()
        for piece in (*reader.read(text), *reader.end()):
            answer.add(piece)
        return answer

    def add(self, piece: Piece) -> None:
        """Adds the next piece."""
        match piece:
            case Text(text, thought=True):
                self.thought += text
            case Text(text):
                self.text += text
            case CallStart(_, id, name):
                self.calls.append(Call(id, name))
            case Arguments(_, text):
                self.calls[-1].arguments += text
