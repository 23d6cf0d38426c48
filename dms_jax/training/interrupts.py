"""Requests to stop a run: Ctrl-C, and SIGTERM (a platform's preemption notice)."""

import signal
import threading
from collections.abc import Callable
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Makes the first Ctrl-C or SIGTERM a request to stop after the current step.

    A second Ctrl-C interrupts at once; SIGTERM may come twice, from a launcher and its platform.
    Signals reach only the main thread, so nothing changes in other threads.

    Args:
      say: called in the handler of the first signal.
    """

    def __init__(self, say: Callable[[], None] = lambda: None):
        self.requested, self._say = False, say
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            for each in _SIGNALS:
                self._previous[each] = signal.signal(each, self._on_signal)
        return self

    def _on_signal(self, number: int, _: Any) -> None:
        if not self.requested:
            self._say()
        self.requested = True
        if number == signal.SIGINT:
            self._restore(signal.SIGINT)

    def _restore(self, each: signal.Signals) -> None:
        # A handler that was not set from Python cannot be restored.
        handler = self._previous[each]
        signal.signal(each, signal.SIG_DFL if handler is None else handler)

    def __exit__(self, *_: Any) -> None:
        for each in self._previous:
            self._restore(each)
