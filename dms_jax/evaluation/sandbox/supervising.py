"""The supervisor of a confined process: starts it, reads its output, counts its threads."""

import contextlib
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
import time
from collections.abc import Iterator, Mapping
from typing import Any

from dms_jax.checks import Number
from dms_jax.errors import CapacityError

_FOLDER = pathlib.Path(__file__).parent
_CHUNK = 1 << 16
_NOTIFICATION = 80  # bytes; the first 8 are its id
_RECEIVE, _ANSWER = 0xC0502100, 0xC0182101  # ioctl: _IOWR('!', 0, 80) and _IOWR('!', 1, 24)
_CONTINUE = 1
_EAGAIN = 11


class Stopped(Exception):
    """A confined process exceeded a limit; the text says which."""


@dataclasses.dataclass
class Confined:
    """One confined process.

    Attributes:
      process: the process.
      control: our end of its control socket.
      deadline: end of its wall time, by `time.monotonic`.
      threads: number of further threads that it may start.
      listener: descriptor of its requests for threads; None if the system lacks the mechanism.
      missing: mechanisms that the system lacks.
    """

    process: subprocess.Popen
    control: socket.socket
    deadline: float
    threads: int
    listener: int | None = None
    missing: tuple[str, ...] = ()

    def read(self, most: int) -> bytes:
        """Reads the output of the process to its end; answers requests for threads meanwhile.

        Raises:
          Stopped: the time ran out, or the output has more than `most` bytes.
        """
        assert self.process.stdout is not None
        output = self.process.stdout.fileno()
        poll = select.poll()
        poll.register(output, select.POLLIN)
        if self.listener is not None:
            poll.register(self.listener, select.POLLIN)
        parts: list[bytes] = []
        size = 0
        while True:
            for descriptor, event in poll.poll(1000 * self._left() + 1):
                if descriptor == self.listener:
                    if event & select.POLLIN:
                        self.answer()
                    else:  # the process has ended
                        poll.unregister(descriptor)
                    continue
                chunk = os.read(output, _CHUNK)
                if not chunk:
                    return b"".join(parts)
                size += len(chunk)
                if size > most:
                    raise Stopped("output")
                parts.append(chunk)

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
        except OSError:  # the process has ended meanwhile
            pass

    def wait(self) -> str:
        """Waits for the end of a process that has closed its output; returns why it failed, or "".

        Raises:
          Stopped: the time ran out.
        """
        try:
            status = self.process.wait(self._left())
        except subprocess.TimeoutExpired:
            raise Stopped("time") from None
        return "time" if status == -signal.SIGXCPU else f"status {status}" if status else ""

    def close(self) -> None:
        """Ends the process and its children, and closes its descriptors."""
        if self.process.returncode is None:  # otherwise its id may be reused by now
            with contextlib.suppress(ProcessLookupError, PermissionError):
                # the group, in case forks were possible
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.kill()
            self.process.wait()
        self.control.close()
        if self.process.stdout is not None:
            self.process.stdout.close()
        if self.listener is not None:
            os.close(self.listener)

    def hand_over(self, job: Mapping[str, Any]) -> None:
        """Waits until the process is locked in, then sends it its job."""
        self.control.settimeout(max(self.deadline - time.monotonic(), 0.01))
        told = b""
        try:
            self.control.sendall(json.dumps(job).encode() + b"\n")
            while not told.endswith(b"\n"):
                chunk, given, _, _ = socket.recv_fds(self.control, _CHUNK, 1)
                if given:
                    self.listener = given[0]
                    os.set_inheritable(self.listener, False)  # like Python's own descriptors
                told += chunk.replace(b"+", b"")
                if not chunk:
                    raise CapacityError(
                        "The sandbox's process ended before it was locked in. Give it more memory."
                    )
        except TimeoutError as error:
            raise Stopped("time") from error
        except ConnectionError as error:
            raise CapacityError("The sandbox's process ended before it read its job.") from error
        self.missing = tuple(json.loads(told)["missing"])
        with contextlib.suppress(ConnectionError):  # it ends if it may not run with less
            self.control.sendall(b"+")

    def _left(self) -> float:
        """Seconds until the deadline.

        Raises:
          Stopped: the deadline has passed.
        """
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise Stopped("time")
        return left


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Turns a lack of processes, open files or disk into a CapacityError."""
    try:
        yield
    except OSError as error:
        raise CapacityError(
            f"The sandbox could not start a process: {error.strerror}. End other processes, or "
            "judge later: with `out=` the answers are kept."
        ) from error


@contextlib.contextmanager
def confined(
    job: Mapping[str, Any], *, seconds: Number, threads: int, stdin: Any = subprocess.DEVNULL
) -> Iterator[Confined]:
    """A context with a confined process, which ends with it.

    Args:
      job: its job, see `inside/__main__.py`.
      seconds: wall time.
      threads: the most threads that it may start.
      stdin: as for `subprocess.Popen`.

    Raises:
      CapacityError: it could not be started.
    """
    with starting():
        ours, theirs = socket.socketpair()
    try:
        with theirs, starting():
            process = subprocess.Popen(
                [
                    *(sys.executable, "-s", "-S", "-X", "utf8", "-m", "inside"),
                    *(str(theirs.fileno()), str(os.getpid())),
                ],
                cwd=_FOLDER,
                env={"PYTHONHASHSEED": "0"} | _libraries(),
                pass_fds=[theirs.fileno()],
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
    except CapacityError:
        ours.close()
        raise
    own = Confined(process, ours, time.monotonic() + seconds, threads)
    try:
        own.hand_over(job)
        yield own
    finally:
        own.close()


def _libraries() -> dict[str, str]:
    """The environment's search path for Python's shared library, if set."""
    name = "LD_LIBRARY_PATH"
    return {name: os.environ[name]} if name in os.environ else {}
