"""Render the chat template of a checkpoint, in jinja2's sandbox, in a process with limits.

A template is code from the checkpoint's author. The sandbox keeps it from changing its inputs and
from reaching anything outside; the process limits its time and memory. The process
(`chat_worker.py`) is started for the first template and runs until this process ends.
"""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from dms_jax.checkpoint.messages import call_names, read_messages, with_written_arguments
from dms_jax.errors import DataError, plain
from dms_jax.helper_process import Helper

MAX_SECONDS = 10.0  # for each conversation; templates usually take about a millisecond
MAX_MEMORY = 2**30  # bytes for the process, on systems that can limit them
_worker = Helper(
    pathlib.Path(__file__).with_name("chat_worker.py"),
    *(str(MAX_MEMORY), str(2 * MAX_SECONDS)),
    seconds=MAX_SECONDS,
)


def render_chat(template: str, *, messages: Sequence[Any], **variables: Any) -> str:
    """Render `template` with `messages`, `add_generation_prompt` and its other variables.

    Messages are read by `read_messages`. A content that is null beside tool calls is given to the
    template as it is, unless the template writes it as the word None: then as an empty text.

    Raises:
        DataError: the template does not compile, rejects these messages, leaves out the tool calls
            of one, or exceeds the limits of time or memory; or the messages are not JSON data.
    """
    read = read_messages(messages)
    calling = [place for place, message in enumerate(read) if message.get("tool_calls")]
    if not calling:
        return _render(template, messages=read, **variables)
    try:
        text = _render(template, messages=read, **variables)
    except DataError:  # some templates write arguments that are a text
        read = with_written_arguments(read)
        text = _render(template, messages=read, **variables)
    emptied = [{**message, "content": message["content"] or ""} for message in read]
    if emptied != read:
        other = _render(template, messages=emptied, **variables)
        text = other if text.count("None") > other.count("None") else text
    for place in calling:
        if missing := [name for name in call_names(read[place]) if name not in text]:
            raise DataError(
                f"the chat template leaves out the tool calls of turn {place} ({missing[0]}). "
                "Leave such conversations out, or set a template that writes them "
                "(model.tokenizer.chat_template)."
            )
    return text


def _render(template: str, **variables: Any) -> str:
    """Render a template in the worker."""
    try:
        request = json.dumps({"template": template, "variables": variables}, default=_as_json)
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(
            "a conversation, and what else goes into a chat template, must be texts, numbers, "
            f"lists and dicts: {plain(error, 200)}"
        ) from error
    try:
        reply = _worker.ask(request)
    except OSError as error:
        raise DataError(
            "chat templates run in a process of their own, which cannot be started: "
            f"{plain(error, 300)}"
        ) from error
    if "text" not in reply:
        raise DataError(f"the chat template failed on the conversation: {reply['error']}")
    return reply["text"]


def _as_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"got {type(value).__name__}")
