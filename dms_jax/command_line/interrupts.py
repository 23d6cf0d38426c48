"""Re-raise a KeyboardInterrupt that Python swallowed.

Python prints and ignores an exception in a finalizer, or in a callback of a weak reference or of
the garbage collector. jax has such callbacks, and tracing triggers collection often: without this,
Ctrl-C while programs compile can print a traceback and leave the command running.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

_AGAIN = 0.05  # seconds until the signal is sent again


@contextlib.contextmanager
def heard() -> Iterator[None]:
    """Sends SIGINT again if Python swallows a KeyboardInterrupt in this context."""
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
