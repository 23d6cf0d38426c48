"""Worker processes with a hard timeout, which speak JSON lines over stdin and stdout.

The worker program reads lines of JSON from standard input and writes one line of JSON for each;
before the first it writes "ready". It imports nothing from the library, so that it starts quickly.
The first question, from any thread, starts it; it runs until this process ends or an answer times
out.

`concurrent.futures.ProcessPoolExecutor` cannot kill the one process that hangs, and processes that
`multiprocessing` spawns import the user's script again, and with it jax.
"""

import atexit
import contextlib
import json
import os
import pathlib
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

_START_SECONDS = 60.0
_MAX_ANSWER = 2**29  # bytes of the longest answer, with every character escaped


def start_python(
    arguments: Sequence[str], environment: Mapping[str, str] = {}, **options: Any
) -> subprocess.Popen[Any]:
    """Starts another Python, which Ctrl-C does not reach, with this one's import path.

    Args:
      arguments: its command line.
      environment: variables beside this process's own.
      **options: see `subprocess.Popen`.

    Raises:
      OSError: it cannot be started.
    """
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return subprocess.Popen(
        [sys.executable, "-P", *arguments],
        env={**os.environ, "PYTHONPATH": path, **environment},
        start_new_session=True,
        **options,
    )


class Running:
    """A worker process and its pipes.

    Args:
      program: the file of the program.
      arguments: its command line arguments.

    Raises:
      OSError: it could not be started.
    """

    def __init__(self, program: pathlib.Path, arguments: tuple[str, ...]):
        self.process = start_python(
            [str(program), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        if self._exchange(b"", _START_SECONDS) != b"ready\n":
            self.close()
            raise OSError(f"{sys.executable} did not start {program.name}")

    def ask(self, request: bytes, seconds: float) -> dict[str, Any]:
        """Sends a line and returns the answer; if it has `spent`, the process is unusable."""
        start = time.monotonic()
        line = self._exchange(request, seconds)
        if line.endswith(b"\n"):
            return json.loads(line)
        if time.monotonic() - start >= seconds:
            return {"error": f"it runs for more than {seconds:g} seconds", "spent": True}
        return {"error": "it ends the process that it runs in", "spent": True}

    @property
    def ended(self) -> bool:
        """Whether the process has ended on its own."""
        return self.process.poll() is not None

    def close(self) -> None:
        """Kills the process and waits until it has ended."""
        self.process.kill()
        self.process.communicate()

    def _exchange(self, request: bytes, seconds: float) -> bytes:
        """Writes a line and reads one; the result is incomplete if the process ends early."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        timer = threading.Timer(seconds, self.process.kill)
        timer.daemon = True
        timer.start()
        try:
            stdin.write(request)
            stdin.flush()
            return stdout.readline(_MAX_ANSWER)
        except BrokenPipeError:
            return b""
        finally:
            timer.cancel()


class Helpers:
    """A pool of worker processes of one program, which any thread can ask.

    Args:
      program: its file.
      *arguments: its command line arguments.
      seconds: timeout of an answer, after which its process is killed.
      count: the most processes; they start as concurrent questions need them.

    Attributes:
      idle: the processes that wait for a question.
      busy: the processes that answer one.
    """

    def __init__(self, program: pathlib.Path, *arguments: str, seconds: float, count: int):
        self.program, self.arguments, self.seconds = program, arguments, seconds
        self._places = threading.Semaphore(count)
        self.idle, self.busy = list[Running](), set[Running]()
        atexit.register(self.close)

    def ask(self, question: str) -> dict[str, Any]:
        """Returns the answer to a question, both in JSON; it has "error" if the process ended.

        Raises:
          OSError: the program cannot be started.
        """
        with self._places:
            running = self._take()
            self.busy.add(running)
            reply: dict[str, Any] = {"spent": True}  # an interrupt leaves half a line in the pipe
            try:
                reply = running.ask(question.encode("ascii") + b"\n", self.seconds)
            finally:
                self.busy.discard(running)
                if "spent" in reply:
                    running.close()
                else:
                    self.idle.append(running)
        return reply

    def _take(self) -> Running:
        with contextlib.suppress(IndexError):  # none is idle
            while (running := self.idle.pop()).ended:
                running.close()
            return running
        return Running(self.program, self.arguments)

    def close(self) -> None:
        """Kills the processes; the next question starts another one."""
        while self.idle:
            self.idle.pop().close()
        for running in tuple(self.busy):  # its question gets an error
            running.process.kill()
