"""`Server`: starts and stops the HTTP process from the main thread.

`Server` runs in the engine's process and serves until a signal ends it. SIGTERM and Ctrl-C close
the address at once. Running requests may finish up to a time limit; then the rest is cancelled, and
their clients are told. A second Ctrl-C does not wait.
"""

import contextlib
import errno
import queue
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from dms_jax.errors import ConfigError, EngineFailedError, OtherProcessError, plain
from dms_jax.serving.rpc import EngineServer, ServedModel, start_http
from dms_jax.serving.service import Service

BACKLOG = 2048  # the most connections that wait to be accepted
_EXIT_TIMEOUT = 10.0  # seconds for clients to read the end of their answers
_SWITCH_SECONDS = 0.5e-3


class Server:
    """A context of the main thread in which a process answers HTTP; requests wait for `serve`.

    On exit the process is killed unless it has ended.

    Args:
      listening: the listening socket of its address.
    """

    def __init__(self, listening: socket.socket):
        self._listening = listening

    def __enter__(self) -> "Server":
        self._connection, other = socket.socketpair()
        with other:
            self._process = start_http(self._listening, other)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._connection.close()

    def _exit_error(self) -> OtherProcessError:
        status = self._process.returncode
        what = "answers no more" if status is None else f"has ended (status {status})"
        return OtherProcessError(
            f"The process that answers HTTP {what}, and the server ends with it. Its messages "
            "are above."
        )

    def serve(self, service: Service, served: ServedModel, *, drain_seconds: float) -> bool:
        """Serves until a signal ends it; called in the main thread.

        Args:
          service: the service, already started.
          served: describes it.
          drain_seconds: time limit of running requests after the signal.

        Returns:
          Whether all of them ended by themselves.

        Raises:
          KeyboardInterrupt: Ctrl-C ended it: the first in order, a second at once.
          OtherProcessError: the process that answers HTTP has ended by itself.
          EngineFailedError: the engine failed; its clients were notified.
        """
        events: queue.SimpleQueue[int | None] = queue.SimpleQueue()  # signals; None for a failure
        with _queue_signals(events), _short_switches():
            service.on_failure = lambda: events.put(None)
            if service.failure is not None:
                events.put(None)
            engine = EngineServer(
                service, self._connection, served, on_disconnect=lambda: events.put(None)
            )
            engine.start()
            # the HTTP process has it too, and closes the address in the end
            self._listening.close()
            event = events.get()
            engine.stop()
            try:
                drained = service.drain(0.0 if event is None else drain_seconds)
            except KeyboardInterrupt:  # wait for at most a chunk: Python cannot exit during one
                service.drain(0.0)
                raise
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_EXIT_TIMEOUT)
        if service.failure is not None:
            kind, what = type(service.failure).__name__, plain(service.failure, 300)
            raise EngineFailedError(
                f"The engine has failed, and the server ends: {kind}: {what}. Its log "
                "is above. Start the server again."
            ) from service.failure
        if event is None or self._process.returncode:
            raise self._exit_error()
        if event == signal.SIGINT:
            raise KeyboardInterrupt
        return drained


def take_address(host: str, port: int) -> socket.socket:
    """Returns a socket that listens at an address; port 0 takes any free port.

    It listens before anything answers, because two sockets may be bound to one address, but only
    one of them can listen. Early clients wait.

    Raises:
      ConfigError: the address is not free, or there is no such address.
    """
    taken = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind((host, port))
        taken.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        taken.close()
        what = str(error).rstrip(".")
        in_use = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        other = " Another --port may be free; 0 takes one that is." if in_use else ""
        raise ConfigError(f"--host {host} --port {port}: {what}.{other}") from error
    return taken


@contextlib.contextmanager
def _short_switches() -> Iterator[None]:
    """Lets the engine's thread run soon after it waits while another thread works.

    By default Python lets a thread work for 5 ms, longer than a step of a small model.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextlib.contextmanager
def _queue_signals(events: "queue.SimpleQueue[int | None]") -> Iterator[None]:
    """Queues SIGTERM and Ctrl-C; a Ctrl-C after another signal raises."""
    received: list[int] = []

    def handle(number: int, frame: Any) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)
        events.put(number)

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
