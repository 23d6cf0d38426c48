"""The judging side of one confined process: starts it, reads what it says, counts its threads."""

import contextlib
import contextvars
import dataclasses
import json
import os
import pathlib
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dms_jax.errors import CapacityError

_FOLDER = pathlib.Path(__file__).parent
_CHUNK = 1 << 16
_NOTIFICATION = 80  # bytes; the first 8 are its number
_RECEIVE, _ANSWER = 0xC0502100, 0xC0182101  # ioctl: _IOWR('!', 0, 80) and _IOWR('!', 1, 24)
_CONTINUE = 1
_EAGAIN = 11


_PATIENCE = 0.2  # seconds until a judgement that is not wanted any more notices
_GIVEN_UP: contextvars.ContextVar[threading.Event | None] = contextvars.ContextVar(
    "given_up", default=None
)


class Stopped(Exception):
    """A confined process went beyond a limit; the text says which."""


class GivenUpError(Exception):
    """Nobody waits for this judgement any more; it has no verdict."""


def until(given_up: threading.Event) -> None:
    """Makes the judgements of this thread end with `GivenUpError` from an event on."""
    _GIVEN_UP.set(given_up)


def patience(deadline: float) -> float:
    """Seconds to wait at a time until a deadline by `time.monotonic`.

    Raises:
      GivenUpError: nobody waits for this judgement.
      Stopped: the time has run out.
    """
    given_up = _GIVEN_UP.get()
    if given_up is not None and given_up.is_set():
        raise GivenUpError
    left = deadline - time.monotonic()
    if left <= 0:
        raise Stopped("time")
    return left if given_up is None else min(left, _PATIENCE)


@dataclasses.dataclass
class Confined:
    """One confined process.

    Attributes:
      process: the process.
      control: our end of its control socket.
      threads: how many more threads it may start.
      listener: where it asks for them; None where the system lacks it.
      missing: mechanisms that the system lacks.
    """

    process: subprocess.Popen
    control: socket.socket
    threads: int
    listener: int | None = None
    missing: tuple[str, ...] = ()

    @property
    def out_of_time(self) -> bool:
        """Whether its processor time ran out and ended it; known once it was closed."""
        return self.process.returncode == -signal.SIGXCPU

    def answer(self) -> None:
        """Answers one request for a thread."""
        import fcntl  # not on Windows

        assert self.listener is not None
        try:
            request = fcntl.ioctl(self.listener, _RECEIVE, bytes(_NOTIFICATION))
            number = struct.unpack_from("<Q", request)[0]
            self.threads -= 1
            verdict = (0, _CONTINUE) if self.threads >= 0 else (-_EAGAIN, 0)
            fcntl.ioctl(self.listener, _ANSWER, struct.pack("<QqiI", number, 0, *verdict))
        except OSError:  # it has ended meanwhile
            pass

    def close(self) -> None:
        """Ends the process and everything that belongs to it."""
        if self.process.returncode is None:  # otherwise its number may be another's by now
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)  # a group, where forks are possible
            self.process.kill()
            self.process.wait()
        self.control.close()
        if self.process.stdout is not None:
            self.process.stdout.close()
        if self.listener is not None:
            os.close(self.listener)


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Makes a lack of processes, open files or disk a CapacityError."""
    try:
        yield
    except OSError as error:
        raise CapacityError(
            f"The sandbox could not start a process: {error.strerror}. End other processes, or "
            "judge later: with `out=` the answers are kept."
        ) from error


@contextlib.contextmanager
def confined(
    job: Mapping[str, Any],
    deadline: float,
    *,
    threads: int,
    calls: socket.socket | None = None,
    stdin: Any = subprocess.DEVNULL,
    stdout: Any = subprocess.DEVNULL,
) -> Iterator[Confined]:
    """Starts a confined process and ends it.

    Args:
      job: what it is to do, see `inside/__main__.py`.
      deadline: when the judgement ends, by `time.monotonic`.
      threads: how many threads it may start.
      calls: its end of the socket for calls.
      stdin, stdout: as for `subprocess.Popen`.

    Raises:
      CapacityError: it could not be started.
    """
    patience(deadline)
    with starting():
        ours, theirs = socket.socketpair()
    descriptors = [theirs.fileno(), -1 if calls is None else calls.fileno()]
    try:
        with theirs, starting():
            process = subprocess.Popen(
                [sys.executable, "-s", "-S", "-X", "utf8", "-m", "inside"]
                + [str(each) for each in (*descriptors, os.getpid())],
                cwd=_FOLDER,
                env={"PYTHONHASHSEED": "0"} | _libraries(),
                pass_fds=[each for each in descriptors if each >= 0],
                stdin=stdin,
                stdout=stdout,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
    except CapacityError:
        ours.close()
        raise
    own = Confined(process, ours, threads)
    try:
        _hand_over(own, job, deadline)
        yield own
    finally:
        own.close()


def _libraries() -> dict[str, str]:
    """Where the system looks for Python's shared library, if it was told."""
    name = "LD_LIBRARY_PATH"
    return {name: os.environ[name]} if name in os.environ else {}


def _hand_over(own: Confined, job: Mapping[str, Any], deadline: float) -> None:
    """Gives a process its job, and learns how far it is locked in."""
    own.control.settimeout(max(deadline - time.monotonic(), 0.01))
    told = b""
    try:
        own.control.sendall(json.dumps(job).encode() + b"\n")
        while not told.endswith(b"\n"):
            chunk, given, _, _ = socket.recv_fds(own.control, _CHUNK, 1)
            if given:
                own.listener = given[0]
                os.set_inheritable(own.listener, False)  # as Python's own descriptors are
            told += chunk.replace(b"+", b"")
            if not chunk:
                raise CapacityError(
                    "The sandbox's process ended before it was locked in. Give it more memory."
                )
    except TimeoutError as error:
        raise Stopped("time") from error
    except ConnectionError as error:
        raise CapacityError("The sandbox's process ended before it read its job.") from error
    own.missing = tuple(json.loads(told)["missing"])
    with contextlib.suppress(ConnectionError):  # it ends where it must not run with less
        own.control.sendall(b"+")


class Stream:
    """Reads what a process writes, up to a number of bytes, and serves processes meanwhile.

    Attributes:
      descriptor: what is read.
      processes: the processes whose threads are counted.
      deadline: when reading ends, by `time.monotonic`.
      most: bytes, in all.
    """

    def __init__(self, descriptor: int, processes: Sequence[Confined], deadline: float, most: int):
        self.descriptor, self.deadline, self.most = descriptor, deadline, most
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLIN)
        self._listeners = {each.listener: each for each in processes if each.listener is not None}
        for listener in self._listeners:
            self._poll.register(listener, select.POLLIN)

    def read(self, end: bytes = b"") -> bytes:
        """Reads to a mark, or to the end.

        Raises:
          Stopped: the time or the number of bytes ran out.
          GivenUpError: nobody waits for it.
        """
        parts: list[bytes] = []
        size = 0
        while True:
            for descriptor, event in self._poll.poll(1000 * patience(self.deadline) + 1):
                if descriptor in self._listeners:
                    if event & select.POLLIN:
                        self._listeners[descriptor].answer()
                    else:  # the process has ended
                        self._poll.unregister(descriptor)
                    continue
                try:
                    chunk = os.read(descriptor, _CHUNK)
                except ConnectionError:  # it ended with something unread
                    chunk = b""
                size += len(chunk)
                if size > self.most:
                    raise Stopped("output")
                parts.append(chunk)
                if not chunk or (end and end in chunk):
                    return b"".join(parts)
