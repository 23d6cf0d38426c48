"""Ctrl-C that is not lost: what is raised in a callback of the garbage collector ends nothing.

jax has such a callback, and tracing collects often: Ctrl-C while programs were compiled was then
answered with a traceback, and the command went on.
"""

import contextlib
import gc
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_AGAIN = 0.05  # seconds until a signal comes again that found the collector at work


@contextlib.contextmanager
def heard() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, but not where that is lost: there it comes once more.

    Signals reach only the main thread, so in another thread nothing changes; nor does it where
    Ctrl-C is ignored, or somebody else's.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    again: list[threading.Timer] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        if not _collecting(frame):
            signal.default_int_handler(number, frame)
        again.append(threading.Timer(_AGAIN, os.kill, (os.getpid(), number)))
        again[-1].daemon = True
        again[-1].start()

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for timer in again:
            timer.cancel()


def _collecting(frame: FrameType | None) -> bool:
    """Whether a frame is of a callback of the garbage collector, or was called by one."""
    callbacks = {getattr(callback, "__code__", None) for callback in gc.callbacks}
    while frame is not None:
        if frame.f_code in callbacks:
            return True
        frame = frame.f_back
    return False
