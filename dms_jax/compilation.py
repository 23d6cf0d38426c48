"""The disk cache of compiled programs, and reports of compile times.

A model's programs take seconds each to compile, once per shape. They are kept in `~/.cache/dms_jax`
(or `$XDG_CACHE_HOME/dms_jax`), up to 8 GB; beyond that the least recently used are deleted:

    DMS_JAX_COMPILATION_CACHE=/a/directory     keeps them there
    DMS_JAX_COMPILATION_CACHE=off              keeps nothing
    JAX_COMPILATION_CACHE_DIR=/a/directory     jax's own switches go before ours, and so does
    JAX_ENABLE_COMPILATION_CACHE=false         jax.config.update("jax_compilation_cache_dir", ...)

Generation's ahead-of-time compiled programs are kept in a subdirectory, in a form that needs no
tracing (`executables`).

Programs found there are executed, so let nobody you do not trust write there.
"""

import contextlib
import dataclasses
import importlib
import itertools
import logging
import math
import os
import pathlib
import platform
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
from jax.experimental.compilation_cache import compilation_cache
from rich.progress import MofNCompleteColumn, Progress, TextColumn

from dms_jax.terminal import Lines, console_for_progress, has_bar

SWITCH = "DMS_JAX_COMPILATION_CACHE"
MOST_BYTES = 8 * 10**9
# Programs that compile faster than this are not kept.
LEAST_SECONDS = 0.2
# Calls with less compile time are not reported.
REPORTED_SECONDS = 3.0

_logger = logging.getLogger("dms_jax")
_listening = threading.Event()


class _Program(NamedTuple):
    """Start and end of making a program, and whether it came from the cache."""

    begin: float
    end: float
    read: bool


_programs: list[_Program] = []  # of this process
_lock = threading.Lock()
_without: list[bool] = []  # for each active `without_jax_cache`, jax's setting before it
_thread = threading.local()


def prepare() -> None:
    """Prepares jax; call it before the first program is traced."""
    # This import adds a setting on which every program depends. If the first kernel did it, earlier
    # traced programs would compile again.
    importlib.import_module("jax.experimental.pallas.tpu")
    _keep_compiled()


def is_off() -> bool:
    """Whether the user turned the cache off; see the module docstring."""
    return os.environ.get(SWITCH, "").lower() in ("off", "no", "false", "0")


def directory() -> str | None:
    """Returns the directory of jax's cache; None if it is off."""
    enabled = _without[0] if _without else jax.config.jax_enable_compilation_cache
    return jax.config.jax_compilation_cache_dir if enabled else None


def _keep_compiled() -> None:
    """Turns on jax's cache unless the user configured it; see the module docstring."""
    if is_off() or jax.config.jax_compilation_cache_dir:
        return
    if not jax.config.jax_enable_compilation_cache:
        return
    asked = os.environ.get(SWITCH, "")
    try:
        caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        directory = pathlib.Path(asked or f"{caches}/dms_jax").expanduser()
        if jax.default_backend() == "cpu":  # programs are specific to the processor
            directory = directory / f"cpu-{platform.node()}"
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=directory):  # otherwise jax would warn for every program
            pass
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home directory
        _logger.info("Compiled programs are not kept: %s", error)
        return
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_compilation_cache_max_size", MOST_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", LEAST_SECONDS)


@dataclasses.dataclass
class Made:
    """The programs made in a context.

    Attributes:
      compiled: number of programs compiled.
      read: number of programs read from the disk cache.
      seconds: time during which at least one was being compiled or read.
    """

    compiled: int = 0
    read: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        if self.read and not self.compiled:
            return f"{_counted(self.read)} read from the cache"
        also = f" and {self.read} read from the cache" if self.read else ""
        return f"{_counted(self.compiled)} compiled{also}"


def _counted(number: int, unit: str = "program") -> str:
    return f"{number} {unit}{'' if number == 1 else 's'}"


@contextlib.contextmanager
def watched() -> Iterator[Made]:
    """Yields a `Made` that is filled in when the context ends."""
    _listen_to_jax()
    made, before = Made(), len(_programs)
    try:
        yield made
    finally:
        programs = _programs[before:]
        made.read = sum(each.read for each in programs)
        made.compiled = len(programs) - made.read
        made.seconds = covered((each.begin, each.end) for each in programs)


def note_read(start: float) -> None:
    """Counts a program read from a cache other than jax's; `start` is a `time.monotonic()`."""
    _programs.append(_Program(start, time.monotonic(), read=True))


def compile_anew(lowered: Any) -> tuple[Any, bool]:
    """Compiles a lowered program; also returns whether the compiler ran.

    It does not run if jax compiled the program in this process before or reads it from its cache.
    Such a program cannot be serialized again: on a CPU its functions would be lost.
    """
    _listen_to_jax()
    _thread.compiled = False
    compiled = lowered.compile()
    return compiled, _thread.compiled


@contextlib.contextmanager
def without_jax_cache() -> Iterator[None]:
    """Turns jax's cache off in this context, for all threads."""
    with _lock:
        _without.append(jax.config.jax_enable_compilation_cache)
        if len(_without) == 1:
            _enable_jax_cache(False)
    try:
        yield
    finally:
        with _lock:
            before = _without.pop()
            if not _without:
                _enable_jax_cache(before)


def _enable_jax_cache(enabled: bool) -> None:
    jax.config.update("jax_enable_compilation_cache", enabled)
    compilation_cache.reset_cache()  # jax reads the setting only once per process


@contextlib.contextmanager
def reported(what: str) -> Iterator[None]:
    """Reports in one line the compile time inside the context, if it is long.

    The line is logged ("dms_jax", INFO), and written to standard error if that is a terminal.
    """
    start = time.monotonic()
    made = Made()
    try:
        with watched() as made:
            yield
    finally:
        if made.seconds >= REPORTED_SECONDS:
            kept = directory()
            line = (
                f"{what}: {made} in {made.seconds:.0f} s, of {time.monotonic() - start:.0f} s in "
                "all" + (f"; they are kept in {kept}." if kept else ".")
            )
            _logger.info(line)
            if sys.stderr.isatty():
                print(line, file=sys.stderr)


@contextlib.contextmanager
def counted(
    total: int, what: str = "Compiling", unit: str = "program"
) -> Iterator[Callable[[], None]]:
    """Yields a function to call, from any thread, whenever one of `total` programs is ready.

    On a terminal, standard error shows the count until the context ends; a file gets a line every
    ten seconds.

    Args:
      total: number of programs, or of other units.
      what: label of the line.
      unit: name of a unit.
    """
    lines, numbers = Lines(), itertools.count(1)
    console = console_for_progress(stderr=True)
    bar = Progress(
        TextColumn(f"{what}:"),
        MofNCompleteColumn(),
        TextColumn(f"{unit}s"),
        console=console,
        transient=True,
        disable=not (total and has_bar(console)),
    )
    task = bar.add_task(what, total=total)

    def count() -> None:
        done = next(numbers)
        bar.advance(task)
        if bar.disable:
            lines.write(f"{what}: {done} of {_counted(total, unit)}")

    with bar:
        yield count


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Returns the length of the union of spans, (begin, end) each, in seconds."""
    total, reached = 0.0, -math.inf
    for begin, end in sorted(spans):
        total += max(end - max(begin, reached), 0.0)
        reached = max(reached, end)
    return total


def _listen_to_jax() -> None:
    if not _listening.is_set():
        _listening.set()
        jax.monitoring.register_event_listener(_note_cache_hit)
        jax.monitoring.register_event_duration_secs_listener(_note_compilation)


def _note_cache_hit(event: str, **_: object) -> None:
    if event == "/jax/compilation_cache/cache_hits":  # for the program this thread waits for
        _thread.read = True


def _note_compilation(event: str, duration_secs: float, **_: object) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        now = time.monotonic()
        read = getattr(_thread, "read", False)
        _programs.append(_Program(now - duration_secs, now, read))
        _thread.read, _thread.compiled = False, not read
