"""Render the chat template of a checkpoint, in jinja2's sandbox, in a process with limits.

A template is code from the checkpoint's author. The sandbox keeps it from changing its inputs and
from reaching anything outside; the process limits its time and memory. The process
(`chat_worker.py`) is started for the first template and runs until this process ends.
"""

import atexit
import json
import os
import pathlib
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from dms_jax.errors import DataError, plain

MAX_SECONDS = 10.0  # for each conversation; templates usually take about a millisecond
MAX_MEMORY = 2**30  # bytes for the process, on systems that can limit them
_START_SECONDS = 60.0
_MAX_ANSWER = 2**29  # bytes of the longest answer, with every character escaped
_PROGRAM = pathlib.Path(__file__).with_name("chat_worker.py")


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
    reply = _ask(request.encode("ascii") + b"\n")
    if "text" not in reply:
        raise DataError(f"the chat template failed on the conversation: {reply['error']}")
    return reply["text"]


def _as_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"got {type(value).__name__}")


class _Worker:
    """The process that renders templates, and the pipes that connect to it."""

    def __init__(self):
        # The search path of this process, so that the same jinja2 is found.
        path = os.pathsep.join(entry for entry in sys.path if entry)
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_PROGRAM), str(MAX_MEMORY), str(2 * MAX_SECONDS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C must reach only the parent
        )
        if self._exchange(b"", _START_SECONDS) != b"ready\n":
            self.close()
            raise OSError(f"{sys.executable} did not start {_PROGRAM.name}")

    def ask(self, request: bytes) -> dict[str, Any]:
        """Send a request and return the answer; with `spent` in it, the process is unusable."""
        start = time.monotonic()
        line = self._exchange(request, MAX_SECONDS)
        if line.endswith(b"\n"):
            return json.loads(line)
        if time.monotonic() - start >= MAX_SECONDS:
            return {"error": f"it runs for more than {MAX_SECONDS:g} seconds", "spent": True}
        return {"error": "it ends the process that it runs in", "spent": True}

    @property
    def ended(self) -> bool:
        """Whether the process has ended for a reason other than a request."""
        return self._process.poll() is not None

    def close(self) -> None:
        """Kill the process and wait until it has ended."""
        self._process.kill()
        self._process.communicate()

    def _exchange(self, request: bytes, seconds: float) -> bytes:
        """Write a line and read one; the line read is incomplete if the process ends early."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        timer = threading.Timer(seconds, self._process.kill)
        timer.daemon = True
        timer.start()
        try:
            stdin.write(request)
            stdin.flush()
            return stdout.readline(_MAX_ANSWER)
        except BrokenPipeError:
            return b""
        finally:
            timer.cancel()


_lock = threading.Lock()
_worker: _Worker | None = None


def _ask(request: bytes) -> dict[str, Any]:
    global _worker
    with _lock:
        if _worker is not None and _worker.ended:
            _close()
        if _worker is None:
            try:
                _worker = _Worker()
            except OSError as error:
                raise DataError(
                    "chat templates run in a process of their own, which cannot be started: "
                    f"{plain(error, 300)}"
                ) from error
        reply: dict[str, Any] = {"spent": True}  # an interrupt leaves half a line in the pipe
        try:
            reply = _worker.ask(request)
        finally:
            if "spent" in reply:
                _worker.close()
                _worker = None
    return reply


def _close() -> None:
    global _worker
    if _worker is not None:
        _worker.close()
        _worker = None


def _forget() -> None:
    """Drop the process after a fork: it belongs to the parent."""
    global _lock, _worker
    _lock, _worker = threading.Lock(), None


atexit.register(_close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
