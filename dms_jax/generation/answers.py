"""Parses the text of an answer into thoughts, content, and tool calls."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from dms_jax.checkpoint.tokenizer import Tokenizer
from dms_jax.generation.call_formats import FORMATS, format_of
from dms_jax.generation.call_readers import (
    Arguments,
    CallReader,
    CallStart,
    Piece,
    Text,
    Tool,
    held_back,
)
from dms_jax.model.language_model import LanguageModel

# The markers that templates write around thoughts before an answer.
THINKING_MARKERS = ("<think>", "</think>"), ("[THINK]", "[/THINK]")


@dataclasses.dataclass(frozen=True)
class AnswerForm:
    """How the text of an answer is parsed.

    Attributes:
      thinks: whether the answer begins with thoughts: "yes" (the prompt ends within them),
        "perhaps" (the model may start them), "no", or "channels" (the call format marks them:
        harmony).
      markers: the text before and after thoughts.
      calls: name of the call format (`call_formats.FORMATS`); None without tools, except harmony.
      tools: the tools that may be called.
      parallel: whether calls after the first one count.
    """

    thinks: Literal["no", "perhaps", "yes", "channels"] = "no"
    markers: tuple[str, str] = THINKING_MARKERS[0]
    calls: str | None = None
    tools: tuple[Tool, ...] = ()
    parallel: bool = True


PLAIN = AnswerForm()


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


class AnswerReader:
    """Parses the text of one answer as it arrives.

    Line breaks around thoughts are dropped: templates write them again.
    """

    def __init__(self, form: AnswerForm):
        self._form, self._held = form, ""
        states = {"perhaps": "begins", "yes": "begins to think"}
        self._state = states.get(form.thinks, "says")
        self._calls: CallReader | None = None
        if form.calls is not None:
            self._calls = FORMATS[form.calls].reader(form.tools)

    def read(self, text: str) -> list[Piece]:
        """Takes more text; returns the pieces that are complete."""
        return self._one_call([*self._split(self._held + text)])

    def end(self) -> list[Piece]:
        """Returns the remaining pieces at the end of the answer."""
        held, self._held = self._held, ""
        pieces = list[Piece]()
        if self._state == "thinks" and held.strip():
            pieces.append(Text(held, thought=True))
        if self._state == "begins":
            pieces += self._say(held)
        if self._calls is not None:
            pieces += self._calls.end()
        return self._one_call(pieces)

    def _split(self, text: str) -> Iterator[Piece]:
        """Yields the pieces of text, and holds back what may become a marker."""
        self._held = ""
        opening, closing = self._form.markers
        if self._state == "begins":
            begun = text.lstrip()
            if begun.startswith(opening):
                self._state, text = "begins to think", begun[len(opening) :]
            elif opening.startswith(begun):
                self._held = text
                return
            else:
                self._state = "says"
        if self._state == "begins to think":
            text = text.lstrip("\n")
            self._state = "thinks" if text else self._state
        if self._state == "thinks":
            thought, marker, rest = text.partition(closing)
            keep = 0 if marker else held_back(thought, closing)
            told = thought[: len(thought) - keep].rstrip("\n")
            if told:
                yield Text(told, thought=True)
            if not marker:
                self._held = text[len(told) :]
                return
            self._state, text = "begins to say", rest
        if self._state == "begins to say":
            text = text.lstrip("\n")
            self._state = "says" if text else self._state
        if self._state == "says":
            yield from self._say(text)

    def _say(self, text: str) -> Sequence[Piece]:
        if self._calls is not None:
            return self._calls.read(text)
        return [Text(text)] if text else []

    def _one_call(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Drops calls after the first one, if only one is allowed."""
        if self._form.parallel:
            return list(pieces)
        return [each for each in pieces if isinstance(each, Text) or each.index == 0]


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
        reader, answer = AnswerReader(form), cls()
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
