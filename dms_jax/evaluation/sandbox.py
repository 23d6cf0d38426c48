"""Run model-written code in processes that can only compute.

    sandbox = Sandbox()
    sandbox.run("assert sorted([2, 1]) == [1, 2]")     # ""
    sandbox.run("assert sorted([2, 1]) == [2, 1]")     # "status 1"

A confined process is a fresh Python that locks itself in before it reads the model's code
(`confined.py`):

- time: limits on processor time (RLIMIT_CPU) and on wall time;
- memory: RLIMIT_AS;
- processes: no fork, no exec, no threads, no signals, no debugging;
- files: none can be written, created, renamed or removed; only Python's library and the system's
  shared libraries can be read (Landlock). Names, sizes and dates of other files are visible;
- network: no sockets of any family;
- the environment is empty, and what it prints is discarded.

All but the first two use an allow list of system calls (seccomp) and Landlock. Both need Linux on
x86-64 or aarch64, without privileges. If one is missing, the sandbox refuses to run and names it;
`allow_weaker=True` runs with the available ones.

The sandbox protects the machine, not the score. HumanEval's tests are code and run in the process
of the answer, as in the original, so malicious code can deceive them. Exiting early is a failure.

It is part of the library because HumanEval needs it and Colab has no containers.
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
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dms_jax.checks import Count, Options, Positive, require
from dms_jax.errors import CapacityError, ConfigError

_PROGRAM = pathlib.Path(__file__).with_name("confined.py")
_OPEN_FILES = 64
# Exit statuses of a process that could not lock itself in, and of a source that ran to its end.
_UNCONFINED, _DONE = 86, 87


@dataclasses.dataclass(frozen=True)
class Sandbox(Options):
    """The limits of model-written code; the module's docstring describes the mechanisms.

    Attributes:
      seconds: processor time of each run, rounded up to whole seconds.
      wall_seconds: wall time of each run; larger, because a machine can be busy.
      megabytes: memory of each run, including Python's.
      allow_weaker: whether to run if the system lacks some of the mechanisms. The code may then
        read and write your files and reach the network.
    """

    seconds: Positive = 10
    wall_seconds: Positive = 60
    megabytes: Count = 1024
    allow_weaker: bool = False

    def require(self) -> None:
        """Checks once that code runs and is contained.

        Raises:
          ConfigError: the system lacks a mechanism, or the limits are too tight to run anything.
          CapacityError: no process can be started.
        """
        _require(self)

    def run(self, source: str) -> str:
        """Runs a program; returns why it did not reach its end ("time", "status 1"), or "".

        Raises:
          ConfigError, CapacityError: see `require`.
        """
        self.require()
        return self._confined(source)[0]

    def _confined(self, source: str) -> tuple[str, str]:
        """Returns why a confined process failed, and the mechanisms that it missed."""
        limits = {
            "CPU": math.ceil(self.seconds),
            "AS": self.megabytes << 20,
            "NOFILE": _OPEN_FILES,
            "FSIZE": 0,
            "CORE": 0,
        }
        job = {"source": source, "limits": limits, "weaker": self.allow_weaker}
        job |= {"unconfined": _UNCONFINED, "done": _DONE}
        try:
            ended = subprocess.run(
                [sys.executable, "-P", "-s", "-S", "-X", "utf8", str(_PROGRAM)],
                cwd="/",
                env={"PYTHONHASHSEED": "0"} | _libraries(),
                input=json.dumps(job).encode(),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                timeout=self.wall_seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return "time", ""
        except OSError as error:
            raise CapacityError(
                f"The sandbox could not start a process: {error.strerror}. End other processes, or "
                "judge later: with `out=` the answers are kept."
            ) from error
        status = ended.returncode
        failure = {_DONE: "", -signal.SIGXCPU: "time"}.get(status, f"status {status}")
        return failure, ended.stdout.decode("utf-8", "replace").strip()


@functools.cache
def _require(sandbox: Sandbox) -> None:
    require(os.name == "posix", f"The sandbox needs Linux; this is {sys.platform}.")
    failure, missing = sandbox._confined("bytearray(1 << 20)")
    if failure == f"status {_UNCONFINED}":
        raise ConfigError(
            f"The sandbox cannot contain code on this system, which lacks {missing}. Judge the "
            "answers on a Linux that has it, or allow less with Sandbox(allow_weaker=True) where "
            "nothing can be lost."
        )
    if failure:
        raise ConfigError(f"No process can run within {sandbox} ({failure}). Allow it more.")


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
