"""The HTTP process, which runs uvicorn.

`server.Server` starts it with two sockets. Its Python lock is its own, because writing the events
of hundreds of streams takes as long as the steps of a small model. It has no device, starts before
the model is loaded (see `Starting`), and ends when the engine's process says so or has ended. It
ignores signals, which the engine's process handles. Limits on slow or hostile clients are left to
a reverse proxy.
"""

import asyncio
import contextlib
import logging
import resource
import signal
import socket
import sys

import uvicorn
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from dms_jax.serving.access import OPEN
from dms_jax.serving.app import make_app
from dms_jax.serving.refusals import RefusalError
from dms_jax.serving.rpc import EngineClient
from dms_jax.serving.server import BACKLOG

_CLOSING_SECONDS = 2.0  # for connections to end by themselves


def main() -> None:
    """Runs the process.

    The command line has the file descriptors of the listening socket and of the engine's.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(format="%(message)s")
    _allow_open_files()
    listening, connection = (socket.socket(fileno=int(each)) for each in sys.argv[1:])
    asyncio.run(serve_http(listening, connection))


def _allow_open_files(number: int = 65_536) -> None:
    """Raises the limit of open files, since every connection counts as one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = number if hard == resource.RLIM_INFINITY else min(number, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


async def serve_http(listening: socket.socket, connection: socket.socket) -> None:
    """Serves HTTP until the engine's process stops it.

    Args:
      listening: the socket of the address.
      connection: the socket of the `EngineServer`.
    """
    engine, app = EngineClient(), Starting()
    config = uvicorn.Config(
        app,
        ws="none",
        log_config=None,  # keep this process's configuration
        log_level="warning",
        access_log=False,
        lifespan="off",
        backlog=BACKLOG,
    )
    server = _Server(config)
    engine.on_stop = server.stop
    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(server.serve([listening]))
        try:
            served = await engine.connect(connection)
        except EOFError:  # the engine's process ended before it had a model, and reported why
            ended = RefusalError("The server has ended before it was ready.", status=503)
            app.use(JSONResponse(ended.openai_body(), ended.status))
            server.stop(graceful=False)
            return
        with contextlib.closing(engine):
            app.use(make_app(engine, served))
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

    def stop(self, graceful: bool) -> None:
        """Accepts no more connections; if graceful, lets the open ones finish."""
        self.should_exit = True
        self.force_exit = self.force_exit or not graceful
        if not graceful:  # uvicorn waits for clients that have sent half a request
            asyncio.get_running_loop().call_later(_CLOSING_SECONDS, self._abort_connections)

    def _abort_connections(self) -> None:
        for each in list(self.server_state.connections):
            if each.transport is not None:
                each.transport.abort()

    def handle_exit(self, sig: int, frame: object) -> None:
        """Ignores signals: the engine's process drains the answers first."""
