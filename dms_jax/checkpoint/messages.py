"""Normalise chat messages of prompts, server requests and training data.

A message has a role and a content, which is a text. Also accepted: content in parts of type text,
which are joined; null or missing content beside tool calls; arguments of tool calls as a JSON
string; null fields (from tables with a column for them). Everything else is refused, because a
template would print it as a Python value or drop it, and a model would learn the word None.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dms_jax.checks import show
from dms_jax.errors import DataError

_UNREAD = {
    "function_call": "write it as tool_calls",
    "audio": "only texts are read",
    "image": "only texts are read",
    "images": "only texts are read",
    "videos": "only texts are read",
}


def read_messages(messages: Any) -> list[dict[str, Any]]:
    """Returns messages in the form that chat templates expect.

    # In: {"role": "user", "content": [{"type": "text", "text": "Hi"}], "tool_calls": None}
    # Out: {"role": "user", "content": "Hi"}

    Raises:
      DataError: a turn is not a message, or its content is not text.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise DataError(f"a conversation is a list of messages, got {show(messages)}.")
    return [_read(message, place) for place, message in enumerate(messages)]


def text_of(content: Any) -> str:
    """Returns the text of a message's content; parts are joined.

    Raises:
      DataError: the content is neither a text nor a list of parts of type text.
    """
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list | tuple) else ()
    texts = []
    for part in parts or [None]:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else 0
        if not isinstance(text, str):
            wrong = part if parts else content
            raise DataError(f"content must be a text, or parts of type text, got {show(wrong)}.")
        texts.append(text)
    return "".join(texts)


def messages_in(text: str) -> list[Any] | None:
    """Returns the messages in a JSON text, as tables store them; None for any other text."""
    if not text.lstrip().startswith("["):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    messages = value if isinstance(value, list) and value else None
    if messages and all(isinstance(each, dict) and "role" in each for each in messages):
        return messages
    return None


def call_names(message: Mapping[str, Any]) -> list[str]:
    """Returns the names of the functions that a message calls."""
    calls = message.get("tool_calls") or ()
    return [(call.get("function") or call)["name"] for call in calls]


def with_written_arguments(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns messages whose tool calls have their arguments as JSON texts."""

    def written(call: Mapping[str, Any]) -> dict[str, Any]:
        if "function" in call:
            return {**call, "function": written(call["function"])}
        given = call.get("arguments")
        text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        return {**call, "arguments": text}

    return [
        {**message, "tool_calls": [written(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else {**message}
        for message in messages
    ]


def _read(message: Any, place: int) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise DataError(
            f"turn {place}: a chat message is a dict with 'role' and 'content', got "
            f"{show(message)}."
        )
    where = f"turn {place} ({message['role']})"
    read = {name: value for name, value in message.items() if value is not None}
    for name, advice in _UNREAD.items():
        if read.pop(name, None):
            raise DataError(f"{where} has {name}, which no chat template is given: {advice}.")
    if "tool_calls" in read:
        read["tool_calls"] = _calls(read["tool_calls"], where)
        if not read["tool_calls"]:
            del read["tool_calls"]
    content = message.get("content")
    if content is None:
        if "tool_calls" not in read:
            raise DataError(
                f"{where} has no content. A chat message is a dict with 'role' and 'content', and "
                "only a turn with tool_calls may leave its content out."
            )
        return {**read, "content": None}
    try:
        return {**read, "content": text_of(content)}
    except DataError as error:
        raise DataError(f"{where}: {error}") from None


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Tool calls with their arguments as data, without null fields."""
    if not isinstance(calls, list | tuple):
        raise DataError(f"{where}: tool_calls must be a list, got {show(calls)}.")
    return [_call(call, where) for call in calls]


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(
            f'{where}: a tool call is {{"function": {{"name": ..., "arguments": ...}}}}, got '
            f"{show(call)}."
        )
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    read = {name: value for name, value in function.items() if value is not None}
    read |= {} if arguments is None else {"arguments": arguments}
    if function is call:
        return read
    return {**{name: value for name, value in call.items() if value is not None}, "function": read}
