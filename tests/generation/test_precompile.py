"""Programs that are compiled in threads before they are needed."""

import signal
import threading

import pytest

from dms_jax.generation import precompile
from tests.generation.support import host_engine

THREADS, PROGRAMS = 4, 12


class Slow:
    """A program that compiles until all are released; the first one interrupts the others."""

    begun: list["Slow"]

    def __init__(self, stop, allowed: threading.Event):
        self._stop, self._allowed = stop, allowed

    def reading(self):
        return lambda: False

    def compiling(self):
        return self.compile

    def compile(self) -> None:
        self.begun.append(self)
        if self._stop is not None:
            self._stop()
        assert self._allowed.wait(60)


class Interrupts:
    """Interrupts the main thread once, as Ctrl-C does.

    Python handles a signal that arrives just before it waits for a lock only at the next one, so
    signals are sent until one is handled.
    """

    def __init__(self):
        self._heeded = threading.Event()

    def __call__(self) -> None:
        ident = threading.main_thread().ident
        assert ident is not None
        signal.pthread_kill(ident, signal.SIGINT)
        while not self._heeded.wait(0.05):
            signal.pthread_kill(ident, signal.SIGINT)

    def handle(self, *_) -> None:
        if not self._heeded.is_set():
            self._heeded.set()
            raise KeyboardInterrupt


def fail() -> None:
    raise ValueError("the compiler gave up")


@pytest.mark.parametrize(
    ("stop", "raised"),
    [(Interrupts(), KeyboardInterrupt), (fail, ValueError)],
    ids=["interrupt", "error"],
)
def test_interrupt_cancels_pending_compilations(monkeypatch, stop, raised):
    """Most of a server's programs are queued when it is interrupted."""
    monkeypatch.setattr(precompile.os, "cpu_count", lambda: THREADS)
    runner, allowed = host_engine().runner, threading.Event()
    Slow.begun = []
    programs = [Slow(None, allowed) for _ in range(PROGRAMS)]
    programs[0] = Slow(lambda: (full.wait(60), stop()), allowed)
    full, shutdown = threading.Event(), precompile.concurrent.futures.ThreadPoolExecutor.shutdown

    def waits(self, wait=True, **options):  # programs cancelled by then never begin
        if wait:
            allowed.set()
        shutdown(self, wait, **options)

    monkeypatch.setattr(precompile.concurrent.futures.ThreadPoolExecutor, "shutdown", waits)

    def compiling():  # after the last program all are cancelled
        full.set()
        return programs[-1].compile

    programs[-1].compiling = compiling
    handler = signal.getsignal(signal.SIGINT)
    if isinstance(stop, Interrupts):
        signal.signal(signal.SIGINT, stop.handle)
    try:
        with pytest.raises(raised):
            precompile._compile(runner, [(program, ()) for program in programs])
    finally:
        signal.signal(signal.SIGINT, handler)
        allowed.set()
    # After an error another program may begin, because the thread is free before the error is seen.
    assert len(Slow.begun) <= THREADS + 1
