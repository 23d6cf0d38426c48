"""The HTTP process: uvicorn, with limits on the time and number of connections.

`server.Server` starts it with two sockets. Its Python lock is its own, because writing the events
of hundreds of streams takes as long as the steps of a small model. It has no device, starts before
the model is loaded (see `Starting`), and ends when the engine's process says so or has ended. It
ignores signals, which the engine's process handles.

uvicorn limits how long a connection may be idle between two requests. `Connection` adds:

    head       a request's head is complete HEAD_TIMEOUT after the connection, or after the
               response before
    writing    a client that receives nothing for WRITE_TIMEOUT is disconnected
    closing    so is one that does not receive the rest of a response
    number     beyond the most connections, the oldest whose request is not complete is closed

`app` limits how long a body may take. Timeouts are checked once a second.
"""

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import time
from typing import Any

import uvicorn
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from dms_jax.serving.access import OPEN
from dms_jax.serving.app import make_app
from dms_jax.serving.parsing import Parser
from dms_jax.serving.rpc import EngineClient
from dms_jax.serving.server import BACKLOG

HEAD_TIMEOUT = 20.0
WRITE_TIMEOUT = 120.0
SPARE_CONNECTIONS = 256  # in addition to those of requests that can run or wait
# Connections accepted per turn of the event loop. An answer takes several turns, and accepting
# connections lengthens each; connections of clients that leave at once stay open for about four
# turns.
_AT_A_TIME = 16
_OTHER_FILES = 64  # file descriptors for everything but connections
_TIMEOUTS = {"head": HEAD_TIMEOUT, "writing": WRITE_TIMEOUT, "closing": WRITE_TIMEOUT}


def main() -> None:
    """Runs the process.

    The command line has the file descriptors of the listening socket and of the engine's.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    handler = logging.StreamHandler()
    handler.addFilter(LogRateLimit())
    logging.basicConfig(handlers=[handler], format="%(message)s")
    listening, connection = (socket.socket(fileno=int(each)) for each in sys.argv[1:])
    asyncio.run(serve_http(listening, connection))


async def serve_http(listening: socket.socket, connection: socket.socket) -> None:
    """Serves HTTP until the engine's process stops it.

    Args:
      listening: the socket of the address.
      connection: the socket of the `EngineServer`.
    """
    engine, app, http = EngineClient(), Starting(), type("Connection", (Connection,), {})
    config = uvicorn.Config(
        app,
        http=http,
        ws="none",
        log_config=None,  # keep this process's configuration
        log_level="warning",
        access_log=False,
        lifespan="off",
        backlog=max_connections(0)[1],
    )
    server = _Server(config)
    engine.on_stop = server.stop
    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(server.serve([listening]))
        try:
            served = await engine.connect(connection)
        except EOFError:  # the engine's process ended before it had a model, and reported why
            server.stop(graceful=False)
            return
        http.max_connections, _ = max_connections(served.max_requests)
        with contextlib.closing(engine), contextlib.closing(Parser(served)) as parser:
            app.use(make_app(engine, served, parser))
            await serving


class Starting:
    """Answers `/health` with 503 "starting" until there is an application; other requests wait."""

    def __init__(self) -> None:
        self._app: asyncio.Future[ASGIApp] = asyncio.get_running_loop().create_future()

    def use(self, app: ASGIApp) -> None:
        """Sends all requests to an application, waiting ones first."""
        self._app.set_result(app)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one ASGI request, or holds it until there is an application."""
        app: ASGIApp = JSONResponse({"status": "starting"}, 503)
        if self._app.done() or scope["path"] != OPEN:
            app = await asyncio.shield(self._app)
        await app(scope, receive, send)


class _Server(uvicorn.Server):
    """uvicorn's server, which the engine's process stops."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Sets a backlog larger than the number of connections accepted at a time."""
        await super().startup(sockets)
        for each in sockets or ():
            each.listen(BACKLOG)

    async def on_tick(self, counter: int) -> bool:
        """Checks the timeouts of all connections, once a second."""
        if counter % 10 == 0:
            for each in list(self.server_state.connections):
                if isinstance(each, Connection):
                    each.check_timeout(time.monotonic())
        return await super().on_tick(counter)

    def stop(self, graceful: bool) -> None:
        """Accepts no more connections; if graceful, lets the open ones finish."""
        self.should_exit = True
        self.force_exit = self.force_exit or not graceful

    def handle_exit(self, sig: int, frame: object) -> None:
        """Ignores signals: the engine's process drains the answers first."""


# -- connections ---------------------------------------------------------------------------------


def max_connections(requests: int) -> tuple[int, int]:
    """Returns the most connections, and how many to accept at a time.

    Raises the limit of open files of this process as far as needed and allowed.

    Args:
      requests: the most that can run or wait.
    """
    wanted, at_a_time = requests + SPARE_CONNECTIONS, _AT_A_TIME
    try:
        import resource
    except ImportError:  # not on Windows
        return wanted, at_a_time
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + 2 * at_a_time + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        needed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
            soft = needed
    if soft == resource.RLIM_INFINITY:
        return wanted, at_a_time
    at_a_time = max(1, min(at_a_time, soft // 4))
    # New connections and the ones just closed to make room for them are open at the same time.
    return max(1, min(wanted, soft - 2 * at_a_time - _OTHER_FILES)), at_a_time


class Connection(H11Protocol):
    """A connection with timeouts.

    Attributes:
      max_connections: the most connections of the server.
    """

    max_connections = SPARE_CONNECTIONS

    def connection_made(self, transport: Any) -> None:
        """Makes room for this connection, or closes it."""
        self._phase: tuple[str | None, Any] = (None, None)
        self._phase_start = self._opened = time.monotonic()
        full = len(self.connections) >= self.max_connections and not self._make_room()
        super().connection_made(transport)
        if full:
            self._abort()

    def pause_writing(self) -> None:
        """Starts the timeout of a client that receives too slowly."""
        super().pause_writing()
        self._phase_start = time.monotonic()

    def check_timeout(self, now: float) -> None:
        """Closes the connection if its phase has taken too long; called now and then."""
        phase = None
        if self.transport.is_closing():
            phase = "closing"
        elif self.flow.write_paused:
            phase = "writing"
        elif self.cycle is None or self.cycle.response_complete:
            phase = "head"
        if (phase, self.cycle) != self._phase:
            self._phase, self._phase_start = (phase, self.cycle), now
        if phase is not None and now - self._phase_start > _TIMEOUTS[phase]:
            self._abort()

    @property
    def is_incomplete(self) -> bool:
        """Whether its request is incomplete, so that closing it loses no answer."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def _make_room(self) -> bool:
        others = [each for each in self.connections if isinstance(each, Connection)]
        incomplete = [each for each in others if each.is_incomplete]
        if not incomplete:
            return False
        min(incomplete, key=lambda each: each._opened)._abort()
        return True

    def _abort(self) -> None:
        self.connections.discard(self)
        self.transport.abort()


class LogRateLimit(logging.Filter):
    """Limits how often each source line logs, as clients can cause any number of log messages.

    Args:
      most: the most messages of a source line in `seconds`.
    """

    def __init__(self, most: int = 20, seconds: float = 60.0):
        super().__init__()
        self._most, self._seconds = most, seconds
        self._logged: dict[tuple[str, int], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to log a record; the last one before the limit says that more follow unlogged."""
        line = record.pathname, record.lineno
        since, count = self._logged.get(line, (record.created, 0))
        if record.created - since > self._seconds:
            since, count = record.created, 0
        self._logged[line] = since, count + 1
        if count + 1 == self._most:
            record.msg = f"{record.getMessage()} (more of these are not logged for a while)"
            record.args = None
        return count < self._most
