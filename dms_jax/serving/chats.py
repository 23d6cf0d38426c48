"""`Chat`: a conversation with its tools, and the prompt that the chat template makes of it."""

import dataclasses
import functools
import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dms_jax.checkpoint.messages import text_of
from dms_jax.checks import check, show
from dms_jax.errors import DataError
from dms_jax.generation.answer_readers import AnswerForm
from dms_jax.generation.answers import answer_form
from dms_jax.generation.call_formats import FORMATS
from dms_jax.generation.requests import (
    Encoder,
    check_characters,
    check_messages_length,
    encode_prompt,
)
from dms_jax.model.template_variables import check_template_variables
from dms_jax.serving.refusals import RefusalError, naming
from dms_jax.serving.tools import NO_TOOLS, Tools

_WORD = re.compile(r"\w+")
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")


@dataclasses.dataclass(frozen=True)
class Chat:
    """A conversation to be answered.

    Attributes:
      messages: in the form of chat templates, which is OpenAI's: role and content, and if present
        reasoning_content, tool_calls, tool_call_id and name.
      tools: the tools that the answer may call.
      variables: other variables of the template.
      field: the field of the messages, for errors.
      begins_answer: whether the prompt ends with the start of an answer.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Tools = NO_TOOLS
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    field: str = "messages"
    begins_answer: bool = True

    def encode(
        self, model: Encoder, most: int, call_format: str | None
    ) -> tuple[list[int], AnswerForm]:
        """Returns the token ids of the prompt, and how the answer to it is parsed.

        Args:
          model: the model with its tokenizer and template.
          most: the most tokens of a prompt.
          call_format: name of the model's call format, if it is known.

        Raises:
          RefusalError: the template rejects the conversation, or ignores tools.
          TooLongError: the prompt is too long.
        """
        tokenizer, name = model.tokenizer, "The conversation"
        if tokenizer is None:
            raise RefusalError("The model has no tokenizer; send token ids as a prompt.")
        if tokenizer.chat_template is None:
            raise RefusalError(
                "The checkpoint has no chat template; send the text as prompt to /v1/completions.",
                param=self.field,
            )
        offered = self.tools.offered
        messages = self.messages
        if call_format is not None and call_format.startswith("mistral"):
            messages = [_with_short_ids(message) for message in messages]
        if call_format == "harmony":
            messages = _as_harmony(messages)
        check_messages_length(messages, most, name)
        tools = {"tools": [tool.written for tool in offered]} if offered else {}
        with naming(self.field):
            text = tokenizer.apply_chat_template(
                messages, self.begins_answer, **{**self.variables, **tools}
            )
            self._check_rendered(text)
            if offered and call_format is None:
                raise RefusalError(
                    "tools: the call format cannot be detected from the chat template or the name "
                    f"of the model. Start the server with --tool-calls ({', '.join(FORMATS)}), or "
                    "leave tools out.",
                    param="tools",
                )
            check_characters(len(text), most, name)
            tokens = encode_prompt(model, tokenizer.encode(text, False), name=name, most=most)
        form = answer_form(
            tokenizer, text, call_format, tools=self.tools.offered, parallel=self.tools.parallel
        )
        return tokens, form

    def _check_rendered(self, text: str) -> None:
        """Refuses tools and tool results that the template ignores."""
        for tool in self.tools.offered:
            if tool.name not in text:
                raise RefusalError(
                    f"The chat template of this model has no place for tools: it leaves out "
                    f"{show(tool.name)}. Leave tools out, or serve a model whose template has one.",
                    param="tools",
                )
        for place, message in enumerate(self.messages):
            words = _WORD.findall(message["content"]) if message["role"] == "tool" else ()
            if words and max(words, key=len) not in text:
                raise RefusalError(
                    f"The chat template of this model leaves out results of tools "
                    f"({self.field}[{place}]). Serve a model whose template has a place for them.",
                    param=self.field,
                )


def template_variables(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the variables that a request sets in the chat template; raises RefusalError."""
    name = "chat_template_kwargs"
    with naming(name):
        checked = check(name, given.get(name, {}), Mapping)
        check_template_variables(name, checked)
    return checked


def content_text(content: Any, where: str, field: str = "messages") -> str:
    """Returns the text of a content, which may have parts; raises RefusalError.

    Accepts the text parts of all APIs under any of their type names.
    """
    if isinstance(content, list):
        content = [_as_text_part(part) for part in content]
        if not content:
            return ""
    try:
        return text_of(content)
    except DataError as error:
        raise RefusalError(f"{where}: {error}", param=field) from None


def _as_text_part(part: Any) -> Any:
    match part:
        case {"type": "input_text" | "output_text"}:
            return {"type": "text", "text": part.get("text")}
        case {"type": "refusal"}:
            return {"type": "text", "text": part.get("refusal")}
    return part


def call_of(id: Any, name: Any, arguments: Any, where: str, field: str) -> dict[str, Any]:
    """Returns a call of an earlier answer as templates expect it; raises RefusalError."""
    if not isinstance(name, str) or not isinstance(id, str | None):
        raise RefusalError(
            f"{where}: a call has an id and the name of a function, which are texts, got "
            f"{show(id)} and {show(name)}.",
            param=field,
        )
    if not isinstance(arguments, str | dict | None):
        raise RefusalError(
            f"{where}: arguments must be a JSON text, got {show(arguments)}.", param=field
        )
    if arguments is None or arguments == "":
        arguments = {}
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": id or "", "type": "function", "function": {"name": name, "arguments": written}}


def result_of(id: Any, content: str, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the message with the result of a call.

    Args:
      id: id of the call.
      content: the result.
      messages: the messages before it; the one with the call names the function.
    """
    message = {"role": "tool", "content": content}
    if not isinstance(id, str):
        return message
    calls = (call for each in messages for call in each.get("tool_calls", ()))
    names = (call["function"]["name"] for call in calls if call["id"] == id)
    name = next(names, None)
    return message | {"tool_call_id": id} | ({} if name is None else {"name": name})


def with_leading_system(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Joins the leading system messages: most templates accept only one."""
    count = next((n for n, each in enumerate(messages) if each["role"] != "system"), len(messages))
    if count < 2:
        return list(messages)
    text = "\n\n".join(each["content"] for each in messages[:count])
    return [{"role": "system", "content": text}, *messages[count:]]


def _with_short_ids(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a message whose call ids have nine letters and digits, as Mistral requires."""
    changed = dict(message)
    if "tool_call_id" in message:
        changed["tool_call_id"] = _short_id(message["tool_call_id"])
    if "tool_calls" in message:
        changed["tool_calls"] = [
            {**call, "id": _short_id(call["id"])} for call in message["tool_calls"]
        ]
    return changed


def _as_harmony(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns messages as the template of gpt-oss expects them.

    Thoughts, and text before a call, become `thinking`. Each message has at most one call, and its
    result follows.
    """
    found: list[Mapping[str, Any]] = []
    placed = set[int]()
    for place, message in enumerate(messages):
        if place in placed:
            continue
        changed = dict(message)
        if "reasoning_content" in changed:
            changed["thinking"] = changed.pop("reasoning_content")
        if "tool_calls" not in changed:
            found.append(changed)
            continue
        behind = itertools.takewhile(
            lambda each: messages[each]["role"] == "tool", range(place + 1, len(messages))
        )
        results = list(behind)
        texts = (changed.get("thinking", ""), changed["content"])
        changed |= {"thinking": "\n".join(filter(None, texts)), "content": ""}
        for call in changed["tool_calls"]:
            found.append(changed | {"tool_calls": [call]})
            changed["thinking"] = ""
            own = (each for each in results if messages[each].get("tool_call_id") == call["id"])
            result = next((each for each in own if each not in placed), None)
            if result is not None:
                placed.add(result)
                found.append(messages[result])
    return found


@functools.lru_cache(maxsize=1024)
def _short_id(id: str) -> str:
    return id if _SHORT_ID.fullmatch(id) else hashlib.sha256(id.encode()).hexdigest()[:9]
