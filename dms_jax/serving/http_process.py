"""The process that answers HTTP: `server.Server` starts it, with two sockets that it inherits.

    python -m dms_jax.serving.http_process LISTENING ENGINE        (their file descriptors)

It has Python's lock for itself: to write the events of hundreds of streams takes as long as the
steps of a small model. It holds no device, is there before the model is, and ends when the engine's
process says so or has gone. Signals are for that one.
"""

import asyncio
import logging
import signal
import socket
import sys
import time

import uvicorn

from dms_jax.serving.app import make_app
from dms_jax.serving.connections import Connection, Seldom, most_connections
from dms_jax.serving.engine_client import EngineClient
from dms_jax.serving.reading import Reader
from dms_jax.serving.starting import BACKLOG


async def answer(listening: socket.socket, connection: socket.socket) -> None:
    """Answers HTTP until the engine's process ends it.

    Args:
      listening: where requests come; it listens at the latest when there is a model.
      connection: to the `EngineServer`.
    """
    engine = EngineClient()
    try:
        served = await engine.open(connection)
    except EOFError:  # it ended before there was a model, and has said why
        return
    most, at_a_time = most_connections(served.most)
    reader = Reader(served)
    config = uvicorn.Config(
        make_app(engine, served, reader),
        http=type("Connection", (Connection,), {"most": most}),
        ws="none",
        log_config=None,  # that of the process stays
        log_level="warning",
        access_log=False,
        lifespan="off",
        backlog=at_a_time,
    )
    server = _Server(config)
    engine.on_end = server.end
    try:
        await server.serve([listening])
    finally:
        reader.close()
        engine.close()


class _Server(uvicorn.Server):
    """A server that the engine's process ends."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Lets more connections wait than are taken at a time."""
        await super().startup(sockets)
        for each in sockets or ():
            each.listen(BACKLOG)

    async def on_tick(self, counter: int) -> bool:
        """Leaves clients that have had their time, once a second."""
        if counter % 10 == 0:
            for each in list(self.server_state.connections):
                if isinstance(each, Connection):
                    each.look(time.monotonic())
        return await super().on_tick(counter)

    def end(self, in_order: bool) -> None:
        """Takes no more connections, and waits for those that there are if it ends in order."""
        self.should_exit = True
        self.force_exit = self.force_exit or not in_order

    def handle_exit(self, sig: int, frame: object) -> None:
        """Leaves signals to the engine's process, which drains the answers first."""


def main() -> None:
    """Answers with the sockets of the command line."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    said = logging.StreamHandler()
    said.addFilter(Seldom())
    logging.basicConfig(handlers=[said], format="%(message)s")
    listening, connection = (socket.socket(fileno=int(each)) for each in sys.argv[1:])
    asyncio.run(answer(listening, connection))


if __name__ == "__main__":
    main()
