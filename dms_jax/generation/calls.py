"""Interrupted calls keep their finished results, and overlapping calls are refused."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dms_jax.errors import BusyError


@contextlib.contextmanager
def keep_finished(done: Callable[[], Mapping[int, Any]]) -> Iterator[None]:
    """Attaches `done()` as `finished` to any exception that is raised inside the context."""
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(AttributeError):  # an exception may not accept attributes
            error.finished = dict(done())  # pyright: ignore[reportAttributeAccessIssue]
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
