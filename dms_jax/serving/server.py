"""A server of HTTP over a service, until a signal ends it in order.

HTTP is answered in a process of its own (`http_process`), the engine runs in this one.

SIGTERM and Ctrl-C close the address at once. Requests that run go on, up to a limit; those that do
not end by then are told so, and their answers are cancelled. A second Ctrl-C does not wait.
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

from dms_jax.errors import ConfigError, DmsJaxError, OtherProcessError, plain
from dms_jax.serving.engine_server import EngineServer
from dms_jax.serving.messages import Served
from dms_jax.serving.service import Service
from dms_jax.serving.starting import BACKLOG, start

_LATE = 10  # seconds after the last answer, in which clients read what they are told
_AGAIN = 1.0  # seconds after which the main thread is told once more


class EngineFailedError(DmsJaxError):
    """The engine's thread has ended before the server was told to."""


class Server:
    """The process that answers HTTP; it starts at once, and waits for `serve`.

    As a context it is killed at the end, unless it has ended; the context is of the main thread.
    If the process ends before `serve` is called, OtherProcessError is raised in that thread,
    whatever it does: it may take minutes to load a model and to compile its programs.

    Args:
      listening: the socket of its address, which listens.

    Raises:
      OSError: the process cannot be started.
    """

    def __init__(self, listening: socket.socket):
        self._listening, self._interrupted, self._watched = listening, False, False
        self._connection, other = socket.socketpair()
        with other:
            self._process = start("http_process", listening, other)

    def __enter__(self) -> "Server":
        self._handler = signal.getsignal(signal.SIGINT)
        if callable(self._handler):  # it is not ignored
            signal.signal(signal.SIGINT, self._interrupt)
        # A signal that means nothing to others: where it is not handled, it is ignored.
        self._urgent = signal.signal(signal.SIGURG, self._hear)
        self._watched = True
        threading.Thread(target=self._watch, name="dms_jax HTTP", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._watched = False
        signal.signal(signal.SIGURG, self._urgent)
        if callable(self._handler):
            signal.signal(signal.SIGINT, self._handler)
        self._process.kill()
        self._process.wait()
        self._connection.close()

    def _interrupt(self, number: int, frame: Any) -> None:
        # jax is told of garbage collections, often while it traces, and what is raised there is
        # lost: `serve` raises it again.
        self._interrupted = True
        if callable(self._handler):
            self._handler(number, frame)

    def _watch(self) -> None:
        """Tells the main thread that the process has ended, until it hears of it."""
        self._process.wait()
        main = threading.main_thread().ident
        while self._watched and main is not None:
            signal.pthread_kill(main, signal.SIGURG)
            time.sleep(_AGAIN)  # what is raised may be lost, as after Ctrl-C

    def _hear(self, number: int, frame: Any) -> None:
        if self._watched:
            raise self._has_ended()

    def _has_ended(self) -> OtherProcessError:
        status = self._process.returncode
        what = "answers no more" if status is None else f"has ended (status {status})"
        return OtherProcessError(
            f"The process that answers HTTP {what}, and the server ends with it. What it said "
            "stands above."
        )

    def serve(self, service: Service, served: Served, *, drain_seconds: float) -> bool:
        """Answers until a signal ends it; called in the main thread.

        Args:
          service: answers; it was started.
          served: what is said of it.
          drain_seconds: how long requests that run may take when it ends.

        Returns:
          Whether all of them ended by themselves.

        Raises:
          KeyboardInterrupt: it was ended by Ctrl-C: in order, or by a second one; or that came
            before, and was lost.
          OtherProcessError: the process that answers HTTP has ended by itself.
          EngineFailedError: the engine has, after its clients were told.
        """
        if self._interrupted:
            raise KeyboardInterrupt
        self._watched = False  # from now on whoever reads from the process hears of its end
        news: queue.SimpleQueue[int | None] = queue.SimpleQueue()  # signals; None for an end
        with _signals(news):
            service.on_failure = lambda: news.put(None)
            if service.failure is not None:
                news.put(None)
            engine = EngineServer(service, self._connection, served, lambda: news.put(None))
            self._listening.close()  # the process has it, and closes the address in the end
            ended_by = news.get()
            engine.end()
            try:
                drained = service.drain(0.0 if ended_by is None else drain_seconds)
            except KeyboardInterrupt:  # at most a chunk: Python cannot end while one is computed
                service.drain(0.0)
                raise
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_LATE)
        if service.failure is not None:
            kind, what = type(service.failure).__name__, plain(service.failure, 300)
            raise EngineFailedError(
                f"The engine has failed, and the server ends: {kind}: {what}. What it was doing "
                "stands above. Start the server again."
            ) from service.failure
        if ended_by is None or self._process.returncode:
            raise self._has_ended()
        if ended_by == signal.SIGINT:
            raise KeyboardInterrupt
        return drained


def take_address(host: str, port: int) -> socket.socket:
    """Takes an address, where nobody is answered yet; port 0 takes any that is free.

    It listens at once: two sockets may be bound to one address, but only one of them listens. Who
    comes early waits.

    Raises:
      ConfigError: it cannot be had.
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
def _signals(news: "queue.SimpleQueue[int | None]") -> Iterator[None]:
    """Puts SIGTERM and Ctrl-C into a queue; a Ctrl-C behind another signal raises."""
    told: list[int] = []

    def tell(number: int, frame: Any) -> None:
        if told and number == signal.SIGINT:
            raise KeyboardInterrupt
        told.append(number)
        news.put(number)

    before = {number: signal.signal(number, tell) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
