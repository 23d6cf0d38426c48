"""`Server`: starts, monitors and stops the HTTP process from the main thread.

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
import threading
import time
from collections.abc import Iterator
from typing import Any

from dms_jax.errors import ConfigError, EngineFailedError, OtherProcessError, plain
from dms_jax.serving.rpc import EngineServer, ServedModel, start_process
from dms_jax.serving.service import Service

BACKLOG = 2048  # the most connections that wait to be accepted
_EXIT_TIMEOUT = 10.0  # seconds for clients to read the end of their answers
_REPEAT_SECONDS = 1.0  # between two signals to the main thread
_SWITCH_SECONDS = 0.5e-3


class Server:
    """A context of the main thread in which a process answers HTTP; requests wait for `serve`.

    On exit the process is killed unless it has ended. If it ends before `serve` is called,
    OtherProcessError interrupts the main thread, which may take minutes to load a model and compile
    its programs.

    Args:
      listening: the listening socket of its address.
    """

    def __init__(self, listening: socket.socket):
        self._listening, self._interrupted, self._monitoring = listening, False, False

    def __enter__(self) -> "Server":
        self._connection, other = socket.socketpair()
        with other:
            self._process = start_process("http_process", self._listening, other)
        self._handler = signal.getsignal(signal.SIGINT)
        if callable(self._handler):  # SIGINT is not ignored
            signal.signal(signal.SIGINT, self._on_interrupt)
        # Nothing else uses this signal, and it is ignored by default.
        self._urgent_handler = signal.signal(signal.SIGURG, self._on_exit)
        self._monitoring = True
        threading.Thread(target=self._monitor, name="dms_jax monitor", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._monitoring = False
        signal.signal(signal.SIGURG, self._urgent_handler)
        if callable(self._handler):
            signal.signal(signal.SIGINT, self._handler)
        self._process.kill()
        self._process.wait()
        self._connection.close()

    def _on_interrupt(self, number: int, frame: Any) -> None:
        # Python drops exceptions raised in a callback of the garbage collector. jax has one, which
        # often runs during tracing, so `serve` raises it again.
        self._interrupted = True
        if callable(self._handler):
            self._handler(number, frame)

    def _monitor(self) -> None:
        """Waits for the process to end, then signals the main thread until it stops monitoring."""
        self._process.wait()
        main = threading.main_thread().ident
        while self._monitoring and main is not None:
            signal.pthread_kill(main, signal.SIGURG)
            time.sleep(_REPEAT_SECONDS)  # the exception may be dropped, as for Ctrl-C

    def _on_exit(self, number: int, frame: Any) -> None:
        if self._monitoring:
            raise self._exit_error()

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
          KeyboardInterrupt: Ctrl-C ended it: the first in order, a second at once; or an earlier
            one was dropped by Python.
          OtherProcessError: the process that answers HTTP has ended by itself.
          EngineFailedError: the engine failed; its clients were notified.
        """
        if self._interrupted:
            raise KeyboardInterrupt
        self._monitoring = False  # from now on the receiving thread notices the process's end
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
