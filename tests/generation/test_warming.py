"""Programs that are compiled in threads before they are needed."""

import signal
import threading

import pytest

from dms_jax.generation import warming
from tests.generation.support import engine_for

THREADS, PROGRAMS = 4, 12


class Slow:
    """A program that is compiled until all are allowed to end; the first one stops the others."""

    begun: list["Slow"]

    def __init__(self, stop, allowed: threading.Event):
        self._stop, self._allowed = stop, allowed

    def lower(self) -> "Slow":
        return self

    def compile(self) -> None:
        self.begun.append(self)
        if self._stop is not None:
            self._stop()
        assert self._allowed.wait(60)


def interrupt() -> None:
    """As Ctrl-C does, in the main thread, which waits by then."""
    ident = threading.main_thread().ident
    assert ident is not None
    signal.pthread_kill(ident, signal.SIGINT)


def fail() -> None:
    raise ValueError("the compiler gave up")


@pytest.mark.parametrize(
    ("stop", "raised"),
    [(interrupt, KeyboardInterrupt), (fail, ValueError)],
    ids=["interrupt", "error"],
)
def test_what_stops_compilations_waits_for_none_that_has_not_begun(monkeypatch, stop, raised):
    """All but a few of a server's programs are in the queue when it is interrupted."""
    monkeypatch.setattr(warming.os, "cpu_count", lambda: THREADS)
    runner, allowed = engine_for("vanilla").runner, threading.Event()
    Slow.begun = []
    programs = [Slow(None, allowed) for _ in range(PROGRAMS)]
    programs[0] = Slow(lambda: (full.wait(60), stop()), allowed)
    full, shutdown = threading.Event(), warming.concurrent.futures.ThreadPoolExecutor.shutdown

    def waits(self, wait=True, **options):  # what has been cancelled by then never begins
        if wait:
            allowed.set()
        shutdown(self, wait, **options)

    monkeypatch.setattr(warming.concurrent.futures.ThreadPoolExecutor, "shutdown", waits)

    def lower():  # of the last program: then all have been told
        full.set()
        return programs[-1]

    programs[-1].lower = lower
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(raised):
            warming._compile(runner, [(program, ()) for program in programs])
    finally:
        signal.signal(signal.SIGINT, handler)
        allowed.set()
    # Of an error another one may begin: its thread is free before anybody knows of it.
    assert len(Slow.begun) <= THREADS + 1
