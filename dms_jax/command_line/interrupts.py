"""Ctrl-C that is not lost: what is raised where Python can raise nothing ends nothing.

Such places are finalizers, callbacks of weak references and of the garbage collector. jax has some
of them, and tracing collects often: Ctrl-C while programs were compiled was then answered with a
traceback, and the command went on.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

_AGAIN = 0.05  # seconds until a signal whose exception was ignored comes again


@contextlib.contextmanager
def heard() -> Iterator[None]:
    """Where a KeyboardInterrupt is raised and ignored, Ctrl-C comes once more, until it is not."""
    before, again = sys.unraisablehook, []

    def hook(unraisable: Any, /) -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            before(unraisable)
            return
        again.append(threading.Timer(_AGAIN, os.kill, (os.getpid(), signal.SIGINT)))
        again[-1].daemon = True
        again[-1].start()

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before
        for timer in again:
            timer.cancel()
