"""Programs that are compiled in threads before they are needed."""

import threading

import pytest

from dms_jax.generation import precompile
from tests.generation.support import host_engine

THREADS, PROGRAMS = 4, 12


class Slow:
    """A program that compiles until all are released; the last one interrupts the call."""

    begun: list["Slow"]

    def __init__(self, stop: type[BaseException] | None, allowed: threading.Event):
        self._stop, self._allowed = stop, allowed

    def reading(self):
        return lambda: False

    def compiling(self):
        if self._stop is not None:
            raise self._stop("enough")
        return self.compile

    def compile(self) -> None:
        self.begun.append(self)
        assert self._allowed.wait(60)


@pytest.mark.parametrize("stop", [KeyboardInterrupt, ValueError])
def test_interrupt_cancels_pending_compilations(monkeypatch, stop):
    """Most of a server's programs are queued when it is interrupted."""
    monkeypatch.setattr(precompile.os, "cpu_count", lambda: THREADS)
    allowed = threading.Event()
    Slow.begun = []
    programs = [Slow(None, allowed) for _ in range(PROGRAMS)] + [Slow(stop, allowed)]
    shutdown = precompile.concurrent.futures.ThreadPoolExecutor.shutdown

    def waits(self, wait=True, **options):  # programs cancelled by then never begin
        if wait:
            allowed.set()
        shutdown(self, wait, **options)

    monkeypatch.setattr(precompile.concurrent.futures.ThreadPoolExecutor, "shutdown", waits)
    with pytest.raises(stop):
        precompile._compile(host_engine().runner, [(program, ()) for program in programs])
    assert len(Slow.begun) <= THREADS
