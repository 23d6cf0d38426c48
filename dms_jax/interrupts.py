"""Keeps the finished results of interrupted calls, and refuses overlapping calls."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

from dms_jax.devices import fits_device
from dms_jax.errors import BusyError


@runtime_checkable
class Recoverable(Protocol):
    """An object with device memory for its work: see `Runner.working`."""

    dirty: bool

    def recover(self) -> None:
        """Makes it ready for work."""

    def release(self) -> None:
        """Frees its memory and contents; `recover` allocates again."""


class Working:
    """The context of `Runner.working`.

    A class for the same reason as `devices.fits_device`.
    """

    def __init__(self, runner: Recoverable):
        self._runner = runner

    def __enter__(self) -> None:
        self._runner.recover()
        self._runner.dirty = True

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            self._runner.dirty = False
            return
        self._runner.release()
        fits_device(
            "The device ran out of memory while generating or scoring. Give the cache less "
            "(memory=), or use fewer lanes or a smaller prefill_chunk."
        ).__exit__(kind, error, trace)


@contextlib.contextmanager
def keep_finished(done: Callable[[], Any]) -> Iterator[None]:
    """Attaches `done()` as `finished` to any exception that is raised inside the context."""
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(AttributeError):  # an exception may not accept attributes
            error.finished = done()  # pyright: ignore[reportAttributeAccessIssue]
        raise


def unless_busy(lock: threading.Lock, what: str) -> threading.Lock:
    """Returns the lock for use in a `with` statement, so that no interrupt leaves it locked.

    Two threads that test it at the same moment may both find it free; then one waits for the other.

    Raises:
      BusyError: if it is locked, by another thread or by a call further up the stack.
    """
    if lock.locked():
        raise BusyError(
            f"{what} is busy with another call, and serves one at a time. Wait for it to end "
            "(calls from on_tokens come in the middle of one), put all prompts into one call, or "
            "create one for each thread."
        )
    return lock
