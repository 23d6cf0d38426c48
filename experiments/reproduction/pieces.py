"""Resumable pieces of work, whose results are files."""

import contextlib
import dataclasses
import fnmatch
import json
import os
import pathlib
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dms_jax.command_line.reports import write_json
from dms_jax.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Piece:
    """A piece of work.

    Attributes:
      name: for files and patterns.
      needs: names of pieces that must be done first.
      work: runs the piece and returns its result, JSON data.
      file: its input file, or None.
    """

    name: str
    needs: tuple[str, ...]
    work: Callable[[], Any]
    file: pathlib.Path | None = None


@dataclasses.dataclass(frozen=True)
class Results:
    """The results of pieces: a file NAME.json for each completed one."""

    folder: pathlib.Path

    def path(self, name: str) -> pathlib.Path:
        """The file of a piece."""
        return self.folder / f"{name}.json"

    def has(self, name: str) -> bool:
        """Whether a piece is done."""
        return self.path(name).exists()

    def read(self, name: str) -> Any:
        """The result of a completed piece."""
        return json.loads(self.path(name).read_text(encoding="utf-8"))


def do_pieces(pieces: Sequence[Piece], results: Results, *, minutes: float) -> int:
    """Runs the remaining pieces in order, until the time is over.

    A piece that fails prints its error, and the others continue.

    Returns:
      1 if a piece failed or its file is missing, else 0.
    """
    end = time.monotonic() + 60 * minutes
    status = 0
    for piece in pieces:
        if results.has(piece.name):
            continue
        if time.monotonic() > end:
            print("The time is over; the same command goes on.")
            break
        if waits := [each for each in piece.needs if not results.has(each)]:
            print(f"{piece.name}: waits for {', '.join(waits)}")
            continue
        if piece.file is not None and not piece.file.exists():
            print(f"{piece.name}: left out: there is no {piece.file}")
            status = 1
            continue
        begin = time.monotonic()
        print(f"{piece.name}: begins, {(end - begin) / 60:.1f} minutes are left", flush=True)
        try:
            with _interrupted_at(end):
                result = piece.work()
        except KeyboardInterrupt:
            if time.monotonic() < end:  # the user's
                raise
            print(f"{piece.name}: the time is over; the same command goes on.")
            break
        except Exception:  # one failed piece must not stop the others; the exit status tells
            traceback.print_exc()
            print(f"{piece.name}: failed", flush=True)
            status = 1
            continue
        write_json(results.path(piece.name), result)
        print(f"{piece.name}: {time.monotonic() - begin:.0f} s", flush=True)
    return status


def chosen(pieces: Sequence[Piece], patterns: Sequence[str]) -> list[Piece]:
    """The pieces of the first pattern, then those of the next.

    Raises:
      ConfigError: a pattern has no piece.
    """
    found: dict[str, Piece] = {}
    for pattern in patterns:
        own = {each.name: each for each in pieces if fnmatch.fnmatchcase(each.name, pattern)}
        if not own:
            raise ConfigError(f"--only {pattern}: no such piece; --only list shows all.")
        found = {**found, **own}  # a piece keeps its first place
    return list(found.values())


@contextlib.contextmanager
def _interrupted_at(end: float) -> Iterator[None]:
    """Sends Ctrl-C at a time of `time.monotonic`, unless the block has ended.

    Shells make background commands ignore Ctrl-C, so the block installs a handler.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    wait = max(end - time.monotonic(), 0)
    timer = threading.Timer(wait, os.kill, (os.getpid(), signal.SIGINT))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        try:
            timer.cancel()
            timer.join()  # a pending signal arrives here, not after the block
        finally:
            signal.signal(signal.SIGINT, before)
