"""`Sandbox`: the limits, and the three kinds of judgement."""

import contextlib
import dataclasses
import functools
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dms_jax.checks import Count, Options, Positive, Whole, require
from dms_jax.errors import CapacityError, ConfigError
from dms_jax.evaluation.sandbox.inside import values
from dms_jax.evaluation.sandbox.supervising import (
    Confined,
    Stopped,
    Stream,
    confined,
    patience,
    starting,
    until,
)

# Attempts that change nothing where they succeed.
_PROBE = """
import os
import socket

folder = f"/tmp/dms-jax-sandbox-{os.getpid()}"
held = 0
for attempt in (
    lambda: open("/etc/passwd").close(),
    lambda: os.listdir("/"),
    lambda: (os.mkdir(folder), os.rmdir(folder)),
    lambda: os.chmod("/", os.stat("/").st_mode & 0o7777),
    lambda: os.fork() or os._exit(1),
    lambda: os.kill(os.getppid(), 0),
    lambda: socket.socket().close(),
):
    try:
        attempt()
    except PermissionError:
        held += 1
print(held, "of 7")
"""
_HELD = "7 of 7\n"


@dataclasses.dataclass(frozen=True)
class Run:
    """What became of a program.

    Attributes:
      output: what it wrote to standard output.
      failure: why it failed; empty if it ended by itself with status 0.
    """

    output: str
    failure: str = ""


@dataclasses.dataclass(frozen=True)
class Call:
    """What became of a call of a function.

    Attributes:
      result: what it returned, as plain values.
      failure: why there is none; empty if there is.
    """

    result: Any
    failure: str = ""


@dataclasses.dataclass(frozen=True)
class Sandbox(Options):
    """The limits of code that a model wrote; see the package's docstring for what holds it.

    Attributes:
      seconds: processor time of each process, rounded up to whole seconds.
      wall_seconds: time of each test on the clock; larger, since a machine can be busy.
      megabytes: memory of each process, Python's own included.
      threads: how many threads it may start, in all.
      output_megabytes: the most that it may print or return.
      allow_weaker: run also where the system lacks some of the mechanisms, with those it has. The
        code then may read and write your files and reach the network.
    """

    seconds: Positive = 10
    wall_seconds: Positive = 60
    megabytes: Count = 1024
    threads: Whole = 64
    output_megabytes: Count = 16
    allow_weaker: bool = False

    def require(self) -> None:
        """Makes sure that code can be run and is contained, by trying some escapes once.

        Raises:
          ConfigError: the system lacks a mechanism, or the limits leave no room to run in.
        """
        _require(self)

    def run(self, source: str, stdin: str = "") -> Run:
        """Runs a program on an input."""
        with contextlib.ExitStack() as files:
            with starting():
                written = files.enter_context(tempfile.NamedTemporaryFile())
                written.write(stdin.encode("utf-8", "replace"))
                written.flush()
                # can be read and not be written
                given = files.enter_context(open(written.name, "rb"))
            return self._run(source, given)

    def _run(self, source: str, given: Any) -> Run:
        try:
            with self._start(
                "program", {"source": source}, stdin=given, stdout=subprocess.PIPE
            ) as (process, deadline):
                assert process.process.stdout is not None
                output = process.process.stdout.fileno()
                text = Stream(output, [process], deadline, self._most).read()
                status = _wait(process, deadline)
        except Stopped as stopped:
            return Run("", str(stopped))
        failure = "time" if process.out_of_time else f"status {status}"
        return Run(text.decode("utf-8", "replace"), failure if status else "")

    def call(self, source: str, name: str, arguments: Sequence[Any]) -> Call:
        """Calls a function of a module, or a method of its class `Solution`."""
        try:
            request = json.dumps([name, values.to_json(list(arguments)), values.to_json({})])
            with self._answering(source, request) as (process, deadline, ours):
                stream = Stream(ours.fileno(), [process], deadline, self._most)
                reply = json.loads(stream.read(b"\n").partition(b"\n")[0] or b"null")
            if reply is None:
                return Call(None, "time" if process.out_of_time else "raised or ended")
            return Call(values.from_json(reply[0]))
        except Stopped as stopped:
            return Call(None, str(stopped))
        except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
            return Call(None, "returned no plain value")

    def check(self, source: str, *, setup: str, tests: str, entry: str) -> str:
        """Runs tests that are code; returns why they failed, or nothing if they passed.

        Args:
          source: the answer, which defines the function `entry`.
          setup: code that the tests need beside it.
          tests: code that defines `check(candidate)`.
          entry: name of the function.
        """
        job = {"setup": setup, "tests": tests, "entry": entry}
        try:
            with (
                self._answering(source) as (process, deadline, ours),
                self._start("checker", job, deadline=deadline, calls=ours) as (checker, _),
            ):
                ours.close()
                verdict = checker.control.fileno()
                told = Stream(verdict, [process, checker], deadline, self._most).read(b"\n")
        except Stopped as stopped:
            return str(stopped)
        try:
            failure = str(json.loads(told)["failed"])
        # Nothing, or what the tests wrote there.
        except (ValueError, TypeError, KeyError, RecursionError):
            failure = "the tests ended early"
        late = process.out_of_time or checker.out_of_time
        return "time" if failure and late else failure

    @contextlib.contextmanager
    def _answering(
        self, source: str, request: str = ""
    ) -> Iterator[tuple[Confined, float, socket.socket]]:
        """A process that answers calls, its deadline, and the socket for calls."""
        with starting():
            ours, theirs = socket.socketpair()
        with ours, theirs:
            job = {"source": source, "request": request}
            with self._start("functions", job, calls=theirs) as (process, deadline):
                theirs.close()
                yield process, deadline, ours

    @contextlib.contextmanager
    def _start(
        self, role: str, job: dict[str, Any], deadline: float | None = None, **streams: Any
    ) -> Iterator[tuple[Confined, float]]:
        require(
            signal.getsignal(signal.SIGCHLD) is not signal.SIG_IGN,
            "The sandbox learns from the system how a program ended, and nothing where SIGCHLD is "
            "ignored: set signal.signal(signal.SIGCHLD, signal.SIG_DFL).",
        )
        limits = {"seconds": math.ceil(self.seconds), "memory": self.megabytes << 20}
        job = {"role": role, "limits": limits, "weaker": self.allow_weaker, **job}
        deadline = deadline or time.monotonic() + self.wall_seconds
        with confined(job, deadline, threads=self.threads, **streams) as process:
            if process.missing and not self.allow_weaker:
                raise ConfigError(
                    "The sandbox cannot contain code on this system, which lacks "
                    f"{'; '.join(process.missing)}. Judge the answers on a Linux that has it, or "
                    "allow less with Sandbox(allow_weaker=True) where nothing can be lost."
                )
            yield process, deadline

    @property
    def _most(self) -> int:
        return self.output_megabytes << 20


def _wait(process: Confined, deadline: float) -> int:
    """The status of a process that has closed its output."""
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.process.wait(patience(deadline))


@functools.cache
def _require(sandbox: Sandbox) -> None:
    require(os.name == "posix", f"The sandbox needs Linux; this is {sys.platform}.")
    try:
        probe = sandbox.run("" if sandbox.allow_weaker else _PROBE)
    except CapacityError as error:
        raise ConfigError(f"{error} It was {sandbox}.") from error
    if probe.failure:
        raise ConfigError(f"Nothing can run within {sandbox} ({probe.failure}). Allow it more.")
    if probe.output != _HELD and not sandbox.allow_weaker:
        raise ConfigError(
            "The sandbox does not hold on this system: of attempts to get at files, processes and "
            f"sockets it refused {probe.output.strip()}. Judge the answers on another system."
        )


def cores() -> int:
    """Processors that this process may use."""
    count = getattr(os, "sched_getaffinity", None)
    return len(count(0)) if count else os.cpu_count() or 1


def side_by_side(judgements: Sequence[Callable[[], Any]]) -> list[Any]:
    """Makes judgements in as many threads as there are processors; each waits for its processes.

    What interrupts one of them, or all, ends those that are under way without a verdict.
    """
    given_up = threading.Event()
    pool = ThreadPoolExecutor(cores(), initializer=until, initargs=(given_up,))
    try:
        return list(pool.map(lambda judge: judge(), judgements))
    finally:
        given_up.set()
        pool.shutdown(cancel_futures=True)
