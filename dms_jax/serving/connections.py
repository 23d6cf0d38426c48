"""Connections of HTTP whose time and number are limited, on top of uvicorn's.

uvicorn limits how long a connection may be idle between two requests. Here are the rest:

    head       a request's head is there HEAD_SECONDS after the connection, or the answer before
    writing    a client takes what it is sent; one that takes nothing for WRITE_SECONDS is left
    closing    so is one that does not take the last of it
    number     where one more connection would be too many, the oldest that has not sent its whole
               request makes room

`app` limits how long a body may take. Times are looked at once a second.
"""

import contextlib
import logging
import time
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 20.0
WRITE_SECONDS = 120.0
SPARE = 256  # connections beside those of the answers that can run or wait
_FILES = 64  # descriptors for everything but connections
_LIMITS = {"head": HEAD_SECONDS, "writing": WRITE_SECONDS, "closing": WRITE_SECONDS}


def most_connections(answers: int) -> tuple[int, int]:
    """Returns the most connections, and how many of them are taken at a time.

    The limit of open files of this process is raised as far as it may be.

    Args:
      answers: the most that can run or wait.
    """
    wanted, at_a_time = answers + SPARE, 128
    try:
        import resource
    except ImportError:  # not on Windows
        return wanted, at_a_time
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + 2 * at_a_time + _FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        needed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
            soft = needed
    if soft == resource.RLIM_INFINITY:
        return wanted, at_a_time
    at_a_time = max(1, min(at_a_time, soft // 4))
    # Those that are taken, and those that have just made room for them, are open together.
    return max(1, min(wanted, soft - 2 * at_a_time - _FILES)), at_a_time


class Connection(H11Protocol):
    """A connection that is left when its client does not do its part.

    Attributes:
      most: the most connections.
    """

    most = SPARE

    def connection_made(self, transport: Any) -> None:
        """Makes room for this one, or leaves it."""
        self._phase: tuple[str | None, Any] = (None, None)
        self._since = self._made = time.monotonic()
        full = len(self.connections) >= self.most and not self._make_room()
        super().connection_made(transport)
        if full:
            self._leave()

    def pause_writing(self) -> None:
        """The client takes too little; from now on it has its time."""
        super().pause_writing()
        self._since = time.monotonic()

    def look(self, now: float) -> None:
        """Leaves the client if it has had its time; called now and then."""
        phase = None
        if self.transport.is_closing():
            phase = "closing"
        elif self.flow.write_paused:
            phase = "writing"
        elif self.cycle is None or self.cycle.response_complete:
            phase = "head"
        if (phase, self.cycle) != self._phase:
            self._phase, self._since = (phase, self.cycle), now
        if phase is not None and now - self._since > _LIMITS[phase]:
            self._leave()

    @property
    def is_asking(self) -> bool:
        """Whether its request is not all there, and nothing is lost with it."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def _make_room(self) -> bool:
        others = [each for each in self.connections if isinstance(each, Connection)]
        asking = [each for each in others if each.is_asking]
        if not asking:
            return False
        min(asking, key=lambda each: each._made)._leave()
        return True

    def _leave(self) -> None:
        self.connections.discard(self)
        self.transport.abort()


class Seldom(logging.Filter):
    """Lets a place of the program say only so much a minute.

    Strangers decide how often something is said of what they send, and it must not fill a disk.

    Args:
      most: messages of a place in `seconds`.
    """

    def __init__(self, most: int = 20, seconds: float = 60.0):
        super().__init__()
        self._most, self._seconds = most, seconds
        self._said: dict[tuple[str, int], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is written; the last one says that more will not be."""
        place = record.pathname, record.lineno
        since, count = self._said.get(place, (record.created, 0))
        if record.created - since > self._seconds:
            since, count = record.created, 0
        self._said[place] = since, count + 1
        if count + 1 == self._most:
            record.msg = f"{record.getMessage()} (more like this is not written for a while)"
            record.args = None
        return count < self._most
