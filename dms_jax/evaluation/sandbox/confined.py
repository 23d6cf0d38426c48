"""`Sandbox`: limits, and running programs and calls within them."""

import contextlib
import dataclasses
import functools
import json
import math
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dms_jax.checks import Count, Options, Positive, Whole, require
from dms_jax.errors import CapacityError, ConfigError
from dms_jax.evaluation.sandbox.supervising import Stopped, confined, starting

# Escape attempts that are harmless if they succeed.
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
    """The result of a program or a call.

    Attributes:
      output: the program's standard output, or the function's result as JSON data; None on failure.
      failure: why it failed: "time", "output", "status 1" or "no value"; empty on success.
    """

    output: Any
    failure: str = ""


@dataclasses.dataclass(frozen=True)
class Sandbox(Options):
    """The limits of model-written code; the package's docstring describes the mechanisms.

    Attributes:
      seconds: processor time of each run, rounded up to whole seconds.
      wall_seconds: wall time of each run; larger, because a machine can be busy.
      megabytes: memory of each run, including Python's.
      threads: the most threads that a run may start in total.
      output_megabytes: the most that a run may print or return.
      allow_weaker: whether to run if the system lacks some of the mechanisms. The code may then
        read and write your files and reach the network.
    """

    seconds: Positive = 10
    wall_seconds: Positive = 60
    megabytes: Count = 1024
    threads: Whole = 64
    output_megabytes: Count = 16
    allow_weaker: bool = False

    def require(self) -> None:
        """Checks once that code runs and is contained, by trying some escapes.

        Raises:
          ConfigError: the system lacks a mechanism, or the limits are too tight to run anything.
        """
        _require(self)

    def run(self, source: str, stdin: str = "") -> Run:
        """Runs a program on an input."""
        with contextlib.ExitStack() as files:
            with starting():
                given = files.enter_context(tempfile.TemporaryFile())
                given.write(stdin.encode("utf-8", "replace"))
                given.seek(0)
            text, failure = self._run({"source": source, "call": None}, stdin=given)
        return Run(text.decode("utf-8", "replace"), failure)

    def call(self, source: str, name: str, arguments: Sequence[Any]) -> Run:
        """Calls a function of a module, or a method of its class `Solution`, with JSON data."""
        text, failure = self._run({"source": source, "call": [name, list(arguments)]})
        if failure:
            return Run(None, failure)
        try:
            return Run(json.loads(text))
        except (ValueError, RecursionError):  # the source exited early, or wrote there itself
            return Run(None, "no value")

    def _run(self, job: dict[str, Any], **streams: Any) -> tuple[bytes, str]:
        """Returns the output of a confined process, and why it failed."""
        require(
            signal.getsignal(signal.SIGCHLD) is not signal.SIG_IGN,
            "The sandbox learns from the system how a program ended, and nothing where SIGCHLD is "
            "ignored: set signal.signal(signal.SIGCHLD, signal.SIG_DFL).",
        )
        limits = {"seconds": math.ceil(self.seconds), "memory": self.megabytes << 20}
        job = {**job, "limits": limits, "weaker": self.allow_weaker}
        try:
            with confined(
                job, seconds=self.wall_seconds, threads=self.threads, **streams
            ) as process:
                if process.missing and not self.allow_weaker:
                    raise ConfigError(
                        "The sandbox cannot contain code on this system, which lacks "
                        f"{'; '.join(process.missing)}. Judge the answers on a Linux that has it, "
                        "or allow less with Sandbox(allow_weaker=True) where nothing can be lost."
                    )
                return process.read(self.output_megabytes << 20), process.wait()
        except Stopped as stopped:
            return b"", str(stopped)


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
    """Judges in one thread per processor.

    An interrupt does not wait for running judgements.
    """
    pool = ThreadPoolExecutor(cores())
    try:
        return list(pool.map(lambda judge: judge(), judgements))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
