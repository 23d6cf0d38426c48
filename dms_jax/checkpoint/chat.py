"""Render the chat template of a checkpoint, in jinja2's sandbox, in a process with limits.

A template is code from the checkpoint's author. The sandbox keeps it from changing its inputs and
from reaching anything outside; the process limits its time and memory. The process
(`chat_worker.py`) is started for the first template and runs until this process ends.
"""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from dms_jax.errors import DataError, plain
from dms_jax.helper_process import Helper

MAX_SECONDS = 10.0  # for each conversation; templates usually take about a millisecond
MAX_MEMORY = 2**30  # bytes for the process, on systems that can limit them
_worker = Helper(
    pathlib.Path(__file__).with_name("chat_worker.py"),
    *(str(MAX_MEMORY), str(2 * MAX_SECONDS)),
    seconds=MAX_SECONDS,
)


def render_chat(template: str, **variables: Any) -> str:
    """Render `template` with `messages`, `add_generation_prompt` and its other variables.

    Raises:
        DataError: the template does not compile, rejects these messages, or exceeds the limits of
            time or memory; or the messages are not JSON data.
    """
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
