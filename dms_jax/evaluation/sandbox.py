r"""Run model-written code in processes that can only compute.

    sandbox = Sandbox()
    sandbox.run("print(int(input()) + 1)", "41\n")          # Run(output="42\n", failure="")
    sandbox.call("def f(x): return x + 1", "f", [41])       # Run(output=42, failure="")

A confined process is a fresh Python that locks itself in before it reads the model's code
(`confined.py`):

- time: limits on processor time (RLIMIT_CPU) and on wall time; it also dies with its parent;
- memory: RLIMIT_AS, which bounds the number of threads too;
- processes: no fork, no exec, no signals to others, no debugging;
- files: none can be written, created, renamed or removed; only Python's library and the system's
  shared libraries can be read (Landlock). Names, sizes and dates of other files are visible;
- network: no sockets of any family;
- the environment is empty, standard error is discarded, and output beyond a limit is a failure.

All but the first two use an allow list of system calls (seccomp) and Landlock. Both need Linux on
x86-64 or aarch64, without privileges. If one is missing, the sandbox refuses to run and names it;
`allow_weaker=True` runs with the available ones.

The sandbox protects the machine, not the score. Expected outputs never enter the process, so
LiveCodeBench's tests cannot be read or faked. HumanEval's tests are code and run in the process of
the answer, as in the original, so malicious code can deceive them. Exiting early is a failure.
"""

import dataclasses
import functools
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dms_jax.checks import Count, Options, Positive, require
from dms_jax.errors import CapacityError, ConfigError

_PROGRAM = pathlib.Path(__file__).with_name("confined.py")
_OPEN_FILES = 64
_UNCONFINED = 86  # the exit status of a process that could not lock itself in


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
    """The limits of model-written code; the module's docstring describes the mechanisms.

    Attributes:
      seconds: processor time of each run, rounded up to whole seconds.
      wall_seconds: wall time of each run; larger, because a machine can be busy.
      megabytes: memory of each run, including Python's.
      output_megabytes: the most that a run may print or return.
      allow_weaker: whether to run if the system lacks some of the mechanisms. The code may then
        read and write your files and reach the network.
    """

    seconds: Positive = 10
    wall_seconds: Positive = 60
    megabytes: Count = 1024
    output_megabytes: Count = 16
    allow_weaker: bool = False

    def require(self) -> None:
        """Checks once that code runs and is contained.

        Raises:
          ConfigError: the system lacks a mechanism, or the limits are too tight to run anything.
          CapacityError: no process can be started.
        """
        _require(self)

    def run(self, source: str, stdin: str = "") -> Run:
        """Runs a program on an input.

        Raises:
          ConfigError, CapacityError: see `require`.
        """
        self.require()
        text, failure = self._confined(source, None, stdin.encode("utf-8", "replace"))
        return Run(text.decode("utf-8", "replace"), failure)

    def call(self, source: str, name: str, arguments: Sequence[Any]) -> Run:
        """Calls a function of a module, or a method of its class `Solution`, with JSON data.

        Raises:
          ConfigError, CapacityError: see `require`.
        """
        self.require()
        text, failure = self._confined(source, [name, list(arguments)], b"")
        if failure:
            return Run(None, failure)
        try:
            return Run(json.loads(text))
        except (ValueError, RecursionError):  # the source exited early, or wrote there itself
            return Run(None, "no value")

    def _confined(self, source: str, call: list[Any] | None, stdin: bytes) -> tuple[bytes, str]:
        """Returns the output of a confined process, and why it failed."""
        most = self.output_megabytes << 20
        limits = {
            "CPU": math.ceil(self.seconds),
            "AS": self.megabytes << 20,
            "NOFILE": _OPEN_FILES,
            "FSIZE": most + 1,  # only its output is a file that it can write
            "CORE": 0,
        }
        job = {"source": source, "call": call, "limits": limits}
        job |= {"weaker": self.allow_weaker, "unconfined": _UNCONFINED}
        file = tempfile.TemporaryFile
        try:
            with file() as asked, file() as given, file() as output:
                for each, content in ((asked, json.dumps(job).encode()), (given, stdin)):
                    each.write(content)
                    each.seek(0)
                command = [sys.executable, "-P", "-s", "-S", "-X", "utf8", str(_PROGRAM)]
                done = subprocess.run(
                    [*command, str(asked.fileno()), str(os.getpid())],
                    cwd="/",
                    env={"PYTHONHASHSEED": "0"} | _libraries(),
                    pass_fds=[asked.fileno()],
                    stdin=given,
                    stdout=output,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                    timeout=self.wall_seconds,
                    check=False,
                )
                output.seek(0)
                text = output.read()
        except subprocess.TimeoutExpired:
            return b"", "time"
        except OSError as error:
            raise CapacityError(
                f"The sandbox could not start a process: {error.strerror}. End other processes, or "
                "judge later: with `out=` the answers are kept."
            ) from error
        if len(text) > most:
            return b"", "output"
        if done.returncode == -signal.SIGXCPU:
            return text, "time"
        return text, f"status {done.returncode}" if done.returncode else ""


@functools.cache
def _require(sandbox: Sandbox) -> None:
    require(os.name == "posix", f"The sandbox needs Linux; this is {sys.platform}.")
    text, failure = sandbox._confined("bytearray(1 << 20)", None, b"")
    if failure == f"status {_UNCONFINED}":
        raise ConfigError(
            f"The sandbox cannot contain code on this system, which lacks {text.decode().strip()}. "
            "Judge the answers on a Linux that has it, or allow less with "
            "Sandbox(allow_weaker=True) where nothing can be lost."
        )
    if failure:
        raise ConfigError(f"Nothing can run within {sandbox} ({failure}). Allow it more.")


def _libraries() -> dict[str, str]:
    """The environment's search path for Python's shared library, if set."""
    name = "LD_LIBRARY_PATH"
    return {name: os.environ[name]} if name in os.environ else {}


def cores() -> int:
    """Processors that this process may use."""
    count = getattr(os, "sched_getaffinity", None)
    return len(count(0)) if count else os.cpu_count() or 1


def side_by_side(judgements: Sequence[Callable[[], Any]]) -> list[Any]:
    """Judges in one thread per processor.

    After an interrupt no more of them begin; running ones end before the process does.
    """
    pool = ThreadPoolExecutor(cores())
    try:
        return list(pool.map(lambda judge: judge(), judgements))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
