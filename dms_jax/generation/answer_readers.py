"""Parsers of streamed answers: one for answers without calls, and one for each call format.

An `AnswerReader` separates thoughts, content and calls, and streams arguments before they are
complete. It returns pieces: `Text`, `CallStart` and `Arguments`. `call_formats` describes the
formats.
"""

import dataclasses
import json
import re
import secrets
from collections.abc import Callable, Mapping
from typing import Any, Literal


@dataclasses.dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    Attributes:
      name: its name.
      description: its description for the model.
      parameters: JSON schema of its arguments, an object.
      strict: whether arguments must match the schema.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    strict: bool = False

    @property
    def written(self) -> dict[str, Any]:
        """The tool as chat templates expect it."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.parameters),
        }
        return {"type": "function", "function": function}


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


# -- pieces of an answer -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Text:
    """More text of an answer: content, or a thought."""

    text: str
    thought: bool = False


@dataclasses.dataclass(frozen=True)
class CallStart:
    """The start of a call: its index in the answer, its id, and the function."""

    index: int
    id: str
    name: str


@dataclasses.dataclass(frozen=True)
class Arguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


Piece = Text | CallStart | Arguments


# -- reading calls -------------------------------------------------------------------------------

_HEADER = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*'
    r'"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_FIRST_KEY = re.compile(r'\{\s*"((?:[^"\\]|\\.)*)"\s*:')
_INTERESTING = re.compile(r'["{}\[\]]')
_IN_STRING = re.compile(r'["\\]')
_NAME = re.compile(r"\s*([^\s\[\]{}]+)\s*(?:\[CALL_ID\][^\s\[\]{}]*)?\s*(?:\[ARGS\])?\s*(?=\{)")
_FUNCTION = re.compile(r"<function=([^>\s]+)>")
_MAY_BECOME_FUNCTION = re.compile(r"<?|<f[a-z]*|<function=[^>\s]*")
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>")
_PARAMETER_END = re.compile(r"</parameter>|(?=<parameter=|</function>)")
_MAY_BECOME_TAG = re.compile(r"(</?[a-z]*|<parameter=[^>\n]*)?")
_HEADER_BEGINNINGS = ("<|channel|>", "<|start|>", "to=")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
MESSAGE_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_MESSAGE_END = re.compile("|".join(map(re.escape, MESSAGE_ENDS)))
_MAY_BECOME_NAME = re.compile(r"\s*[^\s\[\]{}]*\s*(?:\[[A-Z_\]]*[^\s{}]*)?\s*")


class _Object:
    """One JSON object as it arrives.

    Attributes:
      text: its text so far.
      ended: whether it is complete.
      inner_ends: positions after its values that are objects or lists.
    """

    def __init__(self) -> None:
        self.text, self.ended = "", False
        self.inner_ends: list[int] = []
        self._depth, self._quoted, self._escaped = 0, False, False

    def take(self, more: str) -> str:
        """Consumes text up to the end of the object; returns the rest."""
        at = 0
        while at < len(more):
            if self._escaped:
                self._escaped, at = False, at + 1
                continue
            found = (_IN_STRING if self._quoted else _INTERESTING).search(more, at)
            if found is None:
                at = len(more)
                break
            char, at = found[0], found.end()
            if self._quoted:
                self._escaped, self._quoted = char == "\\", char == "\\"
            elif char == '"':
                self._quoted = True
            else:
                self._depth += 1 if char in "{[" else -1
                if self._depth == 1 and char in "}]":
                    self.inner_ends.append(len(self.text) + at)
                if self._depth == 0:
                    self.ended = True
                    break
        self.text += more[:at]
        return more[at:]


class _Call:
    """The JSON object of one call as it arrives, {"name": ..., "arguments": {...}}.

    Args:
      names: allowed functions; None for any.
    """

    def __init__(self, names: frozenset[str] | None = None):
        self.object, self.failed, self._names = _Object(), False, names
        self._start, self._sent = 0, 0  # start of the arguments; end of the returned part

    @property
    def begun(self) -> bool:
        """Whether its name is known."""
        return self._start > 0

    def take(self, more: str, index: int, make_id: Callable[[], str]) -> tuple[list[Piece], str]:
        """Consumes text of the call; returns the new pieces, and the rest of the text."""
        rest = self.object.take(more)
        text, pieces = self.object.text, list[Piece]()
        if not self.begun and (header := _HEADER.match(text)):
            name = _loaded(header[1])
            if self._is_known(name):
                pieces.append(CallStart(index, make_id(), name))
                self._start = self._sent = header.end()
        if self.begun:
            ends = (end for end in self.object.inner_ends if end > self._start)
            end = next(ends, len(text))
            if end > self._sent:
                pieces.append(Arguments(index, text[self._sent : end]))
                self._sent = end
        elif self.object.ended:
            pieces += self._whole(text, index, make_id)
        elif self._names is not None and (key := _FIRST_KEY.match(text)):
            self.failed = key[1] not in ("name", "type", "parameters", "arguments", "id")
            if self.failed:  # a call may follow behind the key
                self.object.text, rest = text[: key.end()], text[key.end() :] + rest
        return pieces, rest

    def _whole(self, text: str, index: int, make_id: Callable[[], str]) -> list[Piece]:
        """Returns the pieces of a complete call with another order of fields."""
        call = _loaded(text)
        name = call.get("name") if isinstance(call, dict) else None
        arguments = call.get("arguments", call.get("parameters", {})) if name else None
        if isinstance(arguments, str):
            arguments = _loaded(arguments)
        if not isinstance(name, str) or not self._is_known(name) or not isinstance(arguments, dict):
            self.failed = True
            return []
        written = json.dumps(arguments, ensure_ascii=False)
        return [CallStart(index, make_id(), name), Arguments(index, written)]

    def _is_known(self, name: Any) -> bool:
        return isinstance(name, str) and (self._names is None or name in self._names)


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def held_back(text: str, marker: str) -> int:
    """Returns the number of last characters of a text that may be the start of a marker."""
    most = min(len(text), len(marker) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(marker[:n])), 0)


class AnswerReader:
    """Parses the text of one answer as it arrives: thoughts, and content.

    It is a state machine whose states are methods: each consumes some of `held`, the unparsed text,
    adds to `pieces`, and returns whether it made progress. Line breaks around thoughts are dropped:
    templates write them again.

    Args:
      form: how the answer is parsed.
    """

    def __init__(self, form: AnswerForm):
        self.form, self.held, self.ended = form, "", False
        self.pieces: list[Piece] = []
        self.state: Callable[[], bool] = self.read_answer
        if form.thinks in ("perhaps", "yes"):
            self.state = self.read_start if form.thinks == "perhaps" else self.read_break

    def read(self, text: str) -> list[Piece]:
        """Parses more text; returns the complete pieces."""
        self.held += text
        while self.held and self.state():
            pass
        return self._taken()

    def end(self) -> list[Piece]:
        """Returns the remaining pieces at the end of the answer."""
        self.ended = True
        while self.held and self.state():
            pass
        self.finish()
        return self._taken()

    def finish(self) -> None:
        """Adds the text that is still held at the end of the answer."""

    def _taken(self) -> list[Piece]:
        """Takes the pieces, without calls after the first one if only one counts."""
        taken, self.pieces = self.pieces, []
        if self.form.parallel:
            return taken
        return [each for each in taken if isinstance(each, Text) or each.index == 0]

    def add_text(self, text: str) -> None:
        """Adds text to the content of the answer."""
        if text:
            self.pieces.append(Text(text))

    def read_start(self) -> bool:
        """The state at the start of an answer that may begin with thoughts."""
        begun, opening = self.held.lstrip(), self.form.markers[0]
        if begun.startswith(opening):
            self.held, self.state = begun[len(opening) :], self.read_break
        elif not self.ended and opening.startswith(begun):
            return False
        else:
            self.state = self.read_answer
        return True

    def read_break(self) -> bool:
        """The state of line breaks before thoughts."""
        self.held = self.held.lstrip("\n")
        self.state = self.read_thought if self.held else self.state
        return bool(self.held)

    def read_thought(self) -> bool:
        """The state of thoughts, up to their marker."""
        closing = self.form.markers[1]
        thought, marker, rest = self.held.partition(closing)
        if not marker and self.ended:
            told, rest = thought if thought.strip() else "", ""
        else:
            keep = 0 if marker else held_back(thought, closing)
            told = thought[: len(thought) - keep].rstrip("\n")
            rest = rest if marker else thought[len(told) :]
        if told:
            self.pieces.append(Text(told, thought=True))
        self.held, self.state = rest, self.read_break_behind if marker else self.state
        return bool(marker)

    def read_break_behind(self) -> bool:
        """The state of line breaks after thoughts."""
        self.held = self.held.lstrip("\n")
        self.state = self.read_answer if self.held else self.state
        return bool(self.held)

    def read_answer(self) -> bool:
        """The state at the start of the content."""
        self.state = self.read_text
        return True

    def read_text(self) -> bool:
        """The state of content, up to the marker of a call."""
        self.add_text(self.held)
        self.held = ""
        return False


class CallReader(AnswerReader):
    """Parses answers that may have calls."""

    make_id: Callable[[], str] = staticmethod(lambda: f"call_{secrets.token_hex(12)}")

    def __init__(self, form: AnswerForm):
        super().__init__(form)
        self.tools, self.calls = {tool.name: tool for tool in form.tools}, 0
        self._call = _Call()
        self._before = ""  # the text before a call, which is content if no call follows

    def finish(self) -> None:
        if self.state != self.read_text and not self._call.begun:  # not a call so far
            self.held = self._before + self._call.object.text + self.held
        if self.held.strip() or (self.held and not self.calls):
            self.add_text(self.held)
        self.held = ""

    def read_until(self, marker: str) -> bool:
        """Reads content up to a marker; returns whether it was found.

        White space before the marker is dropped if a call follows.
        """
        place = self.held.find(marker)
        if place >= 0:
            text = self.held[:place].rstrip()
            self.add_text(text)
            self._before = self.held[len(text) : place + len(marker)]
            self.held = self.held[place + len(marker) :]
            return True
        if not self.ended:
            text = self.held[: len(self.held) - held_back(self.held, marker)].rstrip()
            self.add_text(text)
            self.held = self.held[len(text) :]
        return False

    def begin_call(self, *, names: frozenset[str] | None = None) -> None:
        """Enters the state that reads the next JSON object as a call."""
        self._call, self.state = _Call(names), self.read_call

    def read_call(self) -> bool:
        """The state of a call's JSON object."""
        if not self._call.object.text:
            self.skip()
            if self.held and self.held[0] != "{":
                return self._no_call()
        pieces, self.held = self._call.take(self.held, self.calls, self.make_id)
        self.pieces += pieces
        if self._call.failed:
            return self._no_call()
        if ended := self._call.object.ended:
            self._before, self._call, self.calls = "", _Call(), self.calls + 1
            self.state = self.read_behind
        return ended

    def skip(self, characters: str | None = None) -> None:
        """Skips white space, or given characters, which are content if no call follows."""
        left = self.held.lstrip(characters)
        self._before += self.held[: len(self.held) - len(left)]
        self.held = left

    def _no_call(self) -> bool:
        self.add_text(self._before + self._call.object.text)
        self._before, self._call, self.state = "", _Call(), self.read_text
        return True

    def read_behind(self) -> bool:
        """The state after a call, up to the format's end marker."""
        raise NotImplementedError


class HermesReader(CallReader):
    """Parses the format of Hermes and Qwen."""

    def read_text(self) -> bool:
        if found := self.read_until("<tool_call>"):
            self.begin_call()
        return found

    def read_behind(self) -> bool:
        text, closing = self.held.lstrip(), "</tool_call>"
        if text.startswith(closing):
            self.held = text[len(closing) :]
        elif closing.startswith(text):  # the answer may have ended before the closing marker did
            self.held = "" if self.ended else self.held
            return False
        self.state = self.read_text
        return True


class ParametersReader(HermesReader):
    """Parses the format of Qwen3-Coder; it returns each parameter when it is complete."""

    def read_text(self) -> bool:
        if found := self.read_until("<tool_call>"):
            self.state = self.read_function
        return found

    def read_function(self) -> bool:
        """The state before the name of a function."""
        self.skip()
        if name := _FUNCTION.match(self.held):
            self.held, self.state = self.held[name.end() :], self.read_parameter
            self.pieces.append(CallStart(self.calls, self.make_id(), name[1]))
            self.pieces.append(Arguments(self.calls, "{"))
            self._before, self._name, self._separator, self._searched = "", name[1], "", 0
        elif not self.ended and _MAY_BECOME_FUNCTION.fullmatch(self.held):
            return False
        else:
            return self._no_call()
        return True

    def read_parameter(self) -> bool:
        """The state within a call, between two parameters."""
        self.held = self.held.lstrip()
        if opening := _PARAMETER.match(self.held):
            end = _PARAMETER_END.search(self.held, max(opening.end(), self._searched))
            if end is None:  # resume the search where a marker may have begun
                self._searched = len(self.held) - len("</parameter>")
                return False
            name, text = opening[1], self.held[opening.end() : end.start()]
            value = self._value(name, text.removeprefix("\n").removesuffix("\n"))
            written = f"{self._separator}{json.dumps(name, ensure_ascii=False)}: {value}"
            self.pieces.append(Arguments(self.calls, written))
            self.held, self._separator, self._searched = self.held[end.end() :], ", ", 0
            return True
        closing = "</function>"
        if self.held.startswith(closing):
            self.held = self.held[len(closing) :]
        elif self.ended or _MAY_BECOME_TAG.fullmatch(self.held):
            return False
        self.pieces.append(Arguments(self.calls, "}"))
        self.calls, self.state = self.calls + 1, self.read_behind
        return True

    def finish(self) -> None:
        if self.state == self.read_parameter:  # an incomplete parameter has no value
            self.held = ""
        super().finish()

    def _value(self, name: str, text: str) -> str:
        """Returns a parameter as JSON: a string unless its schema has another type."""
        tool = self.tools.get(self._name)
        properties = {} if tool is None else tool.parameters.get("properties", {})
        schema = properties.get(name, {}) if isinstance(properties, dict) else {}
        kinds = schema.get("type") if isinstance(schema, dict) else None
        value = _loaded(text)
        if kinds == "string" or (value is None and text.strip() != "null"):
            bare = text.strip().lower()
            if kinds == "boolean" and bare in ("true", "false"):  # as Python writes them
                return bare
            return json.dumps(text, ensure_ascii=False)
        if isinstance(kinds, list) and "string" in kinds and value is not None:
            return json.dumps(text, ensure_ascii=False)
        return text.strip()


class LlamaReader(CallReader):
    """Parses the format of Llama 3: an answer of JSON, perhaps after <|python_tag|>."""

    def __init__(self, form: AnswerForm):
        super().__init__(form)
        self.names = frozenset(self.tools)

    def read_answer(self) -> bool:
        """The state at the start of the content, and after a call."""
        self.skip(" \n;" if self.calls else " \n")
        tag = "<|python_tag|>"
        if self.held.startswith("{"):
            self.begin_call(names=self.names)
        elif self.held.startswith(tag):
            self.held = self.held[len(tag) :]
        elif not self.ended and tag.startswith(self.held):
            return False
        else:
            self.held, self._before, self.state = self._before + self.held, "", self.read_text
        return True

    def read_text(self) -> bool:
        if found := self.read_until("<|python_tag|>"):
            self.begin_call(names=self.names)
        return found

    def read_behind(self) -> bool:
        self.state = self.read_answer
        return True


class MistralReader(CallReader):
    """Parses both formats of Mistral."""

    make_id = staticmethod(lambda: secrets.token_hex(5)[:9])  # as its templates require
    marker = "[TOOL_CALLS]"

    def read_text(self) -> bool:
        if found := self.read_until(self.marker):
            self.state = self.read_kind
        return found

    def read_kind(self) -> bool:
        """The state after the marker: a list of calls, or the name of a function."""
        self.skip()
        if self.held.startswith("["):
            self._before += "["
            self.held, self.state = self.held[1:], self.read_list
        elif name := _NAME.match(self.held):
            self.held, self.state = self.held[name.end() :], self.read_arguments
            self.pieces.append(CallStart(self.calls, self.make_id(), name[1]))
            self._before, self._arguments = "", _Object()
        elif not self.ended and _MAY_BECOME_NAME.fullmatch(self.held):
            return False
        else:
            return self._no_call()
        return True

    def read_arguments(self) -> bool:
        """The state of arguments after the name of a function."""
        before = len(self._arguments.text)
        self.held = self._arguments.take(self.held)
        self.pieces.append(Arguments(self.calls, self._arguments.text[before:]))
        if self._arguments.ended:
            self.calls, self.state = self.calls + 1, self.read_text
        return self._arguments.ended

    def read_list(self) -> bool:
        """The state between two calls of a list."""
        self.skip(" \n,")
        if self.held.startswith("{"):
            self.begin_call()
            return True
        if not self.held and not self.ended:
            return False
        if not self.calls:
            return self._no_call()
        self.held, self.state = self.held.removeprefix("]"), self.read_text
        return True

    def read_behind(self) -> bool:
        self.state = self.read_list
        return True


class HarmonyReader(CallReader):
    """Parses harmony: messages, each with a header that names its channel and recipient.

    The channel `analysis` and messages to built-in tools are thoughts. Text without a header is
    content.
    """

    def __init__(self, form: AnswerForm):
        super().__init__(form)
        self.state = self.read_header
        self._make_piece: Callable[[str], Piece] = Text
        self._calls = False  # whether the message is a call
        self._kinds = set[bool]()  # of texts so far: said, thought

    def read_header(self) -> bool:
        """The state before the text of a message."""
        header, marker, text = self.held.partition("<|message|>")
        begun = header.lstrip()
        if not begun.startswith(_HEADER_BEGINNINGS):
            if not self.ended and any(each.startswith(begun) for each in _HEADER_BEGINNINGS):
                return False
            self._begin_text(thought=False)
        elif marker:
            self._begin_message(header)
            self.held = text
        else:  # the header is incomplete
            self.held = "" if self.ended else self.held
            return False
        self.state = self.read_message
        return True

    def read_message(self) -> bool:
        """The state of the text of a message."""
        end = _MESSAGE_END.search(self.held)
        most = max(held_back(self.held, each) for each in MESSAGE_ENDS)
        place = len(self.held) - (0 if self.ended else most) if end is None else end.start()
        if place > 0:
            self.pieces.append(self._make_piece(self.held[:place]))
        self.held = self.held[place:]
        if end is None:
            return False
        if end[0] != "<|start|>":  # which begins the next header
            self.held = self.held[len(end[0]) :]
        self.calls += self._calls
        self._calls, self.state = False, self.read_header
        return True

    def finish(self) -> None:
        pass

    def _begin_message(self, header: str) -> None:
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        to = "" if recipient is None else recipient[1]
        name, index = to.removeprefix("functions."), self.calls
        if self.tools and (name != to or name in self.tools):
            self.pieces.append(CallStart(index, self.make_id(), name))
            self._make_piece, self._calls = (lambda text: Arguments(index, text)), True
        else:
            thought = channel is None or channel[1] == "analysis" or bool(to)
            self._begin_text(thought=thought)

    def _begin_text(self, *, thought: bool) -> None:
        """Starts a text, on a new line if it is not the first of its kind."""
        if thought in self._kinds:
            self.pieces.append(Text("\n", thought))
        self._kinds.add(thought)
        self._make_piece = lambda text: Text(text, thought)
