"""Runs the application on an address until it is told to end, and then ends in order.

SIGTERM and Ctrl-C close the address at once. Requests that run go on, up to a limit; those that do
not end by then are told so, and their answers are cancelled. A second Ctrl-C does not wait.
"""

import asyncio
import contextlib
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import uvicorn

from dms_jax.errors import ConfigError
from dms_jax.serving.service import Service

# The engine's thread and the loop take turns in Python. Whichever waits for the other gets its turn
# after so many seconds, of which a chunk of steps of a small model has some hundredths.
_TURN = 2e-4
_LATE = 10  # seconds beyond the limit, in which clients are told that their answers are cut off


class Server(uvicorn.Server):
    """A server of HTTP whose end drains the service.

    Args:
      app: the application over the service.
      service: what it answers with.
      drain_seconds: how long requests that run may take when it ends.

    Attributes:
      drained: whether all of them ended by themselves.
    """

    def __init__(self, app: Any, service: Service, *, drain_seconds: float):
        self._service, self._drain_seconds = service, drain_seconds
        self._draining: threading.Thread | None = None
        self.drained = False
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,  # that of the process stays
                log_level="warning",
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=int(drain_seconds) + _LATE,
            )
        )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Takes no more requests; called for signals."""
        super().handle_exit(sig, frame)  # first: it takes a Ctrl-C after `end` for a second one
        self.end()

    def end(self) -> None:
        """Begins to drain the service; returns at once."""
        self.should_exit = True
        self._service.refuse()
        if self._draining is None:
            self._draining = threading.Thread(target=self._drain, daemon=True)
            self._draining.start()

    def _drain(self) -> None:
        self.drained = self._service.drain(self._drain_seconds)

    def serve_on(self, listening: socket.socket) -> None:
        """Answers until it is told to end, and returns when everything has ended."""
        with _quiet_signals(), _short_turns():
            asyncio.run(self.serve([listening]))
        self.end()
        assert self._draining is not None
        self._draining.join(0 if self.force_exit else None)


def take_address(host: str, port: int) -> socket.socket:
    """Takes an address, where nobody is answered yet; port 0 takes any that is free.

    Raises:
      ConfigError: it cannot be had.
    """
    taken = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind((host, port))
    except (OSError, OverflowError) as error:
        taken.close()
        what = str(error).rstrip(".")
        raise ConfigError(f"--host {host} --port {port}: {what}.") from error
    return taken


@contextlib.contextmanager
def _short_turns() -> Iterator[None]:
    """Threads take shorter turns than Python's own, of 5 ms."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(_TURN)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextlib.contextmanager
def _quiet_signals() -> Iterator[None]:
    """Uvicorn sends itself the signals that ended it once more, when it is done: SIGTERM is heard.

    Signals reach the main thread alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
