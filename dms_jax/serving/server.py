"""`Server`: the process that answers HTTP, seen from the main thread of the engine's process.

`Server` starts that process (`http_process`) and monitors it, and serves until a signal ends it.

SIGTERM and Ctrl-C close the address at once. Running requests go on, up to a limit; those that have
not ended by then are cancelled, and their clients are told so. A second Ctrl-C does not wait.
"""

import contextlib
import errno
import queue
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

from dms_jax.errors import ConfigError, EngineFailedError, OtherProcessError, plain
from dms_jax.serving.rpc import EngineServer, ServedModel, start_process
from dms_jax.serving.service import Service

BACKLOG = 2048  # connections that wait to be accepted
_EXIT_TIMEOUT = 10.0  # seconds after the last answer, in which clients read the end of theirs
_REPEAT_SECONDS = 1.0  # between two signals to the main thread


class Server:
    """A context, of the main thread, in which a process answers HTTP; requests wait for `serve`.

    The process is killed at the end, unless it has ended. If it ends before `serve` is called,
    OtherProcessError is raised in the main thread, whatever that does: it may take minutes to load
    a model and to compile its programs.

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
        if callable(self._handler):  # it is not ignored
            signal.signal(signal.SIGINT, self._on_interrupt)
        # No other program uses this signal, and it is ignored where it has no handler.
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
        # Python drops what is raised in a callback of the garbage collector, which jax has and
        # often runs while it traces: `serve` raises it again.
        self._interrupted = True
        if callable(self._handler):
            self._handler(number, frame)

    def _monitor(self) -> None:
        """Waits for the process to end, then signals the main thread until it stops monitoring."""
        self._process.wait()
        main = threading.main_thread().ident
        while self._monitoring and main is not None:
            signal.pthread_kill(main, signal.SIGURG)
            time.sleep(_REPEAT_SECONDS)  # what is raised may be dropped, as for Ctrl-C

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
          service: the service; it was started.
          served: describes it.
          drain_seconds: how long running requests may take in the end.

        Returns:
          Whether all of them ended by themselves.

        Raises:
          KeyboardInterrupt: Ctrl-C ended it: in order, or the second one at once; or one before,
            which Python dropped.
          OtherProcessError: the process that answers HTTP has ended by itself.
          EngineFailedError: the engine has, after its clients were notified.
        """
        if self._interrupted:
            raise KeyboardInterrupt
        self._monitoring = False  # from now on the receiving thread notices its end
        events: queue.SimpleQueue[int | None] = queue.SimpleQueue()  # signals; None for a failure
        with _queue_signals(events):
            service.on_failure = lambda: events.put(None)
            if service.failure is not None:
                events.put(None)
            engine = EngineServer(
                service, self._connection, served, on_disconnect=lambda: events.put(None)
            )
            engine.start()
            self._listening.close()  # the process has it, and closes the address in the end
            event = events.get()
            engine.stop()
            try:
                drained = service.drain(0.0 if event is None else drain_seconds)
            except KeyboardInterrupt:  # at most a chunk: Python cannot end while one is computed
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
    """Returns a socket that listens at an address; port 0 takes any that is free.

    It listens before anything answers: two sockets may be bound to one address, but only one of
    them listens. Early clients wait.

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
