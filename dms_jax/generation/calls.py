"""Calls that end early, and calls that meet: what is done is carried, and one runs at a time."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dms_jax.errors import BusyError


@contextlib.contextmanager
def carrying(done: Callable[[], Mapping[int, Any]]) -> Iterator[None]:
    """Gives whatever is raised inside the attribute `finished`: `done()` at that time."""
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(AttributeError):  # an error that takes no attributes goes without
            error.finished = dict(done())  # pyright: ignore[reportAttributeAccessIssue]
        raise


def unless_busy(lock: threading.Lock, what: str) -> threading.Lock:
    """Returns the lock for a `with`, which no interrupt leaves locked.

    Two threads that look at the same moment may both find it open; then one waits for the other.

    Raises:
      BusyError: it is locked, by another thread or by a call that this one is made from.
    """
    if lock.locked():
        raise BusyError(
            f"{what} is busy with another call, and serves one at a time. Wait for it to end "
            "(calls from on_tokens come in the middle of one), put all prompts into one call, or "
            "make another one for each thread."
        )
    return lock
