"""The process that answers HTTP: `server.Server` starts it, with two sockets that it inherits.

    python -m dms_jax.serving.http_process LISTENING ENGINE        (their file descriptors)

It has Python's lock for itself: to write the events of hundreds of streams takes as long as the
steps of a small model. It holds no device, is there before the model is, and ends when the engine's
process says so or has gone. Signals are for that one.
"""

import asyncio
import signal
import socket
import sys

import uvicorn

from dms_jax.serving.app import make_app
from dms_jax.serving.engine_client import EngineClient


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
    config = uvicorn.Config(
        make_app(engine, served),
        log_config=None,  # that of the process stays
        log_level="warning",
        access_log=False,
        lifespan="off",
    )
    server = _Server(config)
    engine.on_end = server.end
    try:
        await server.serve([listening])
    finally:
        engine.close()


class _Server(uvicorn.Server):
    """A server that the engine's process ends."""

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
    listening, connection = (socket.socket(fileno=int(each)) for each in sys.argv[1:])
    asyncio.run(answer(listening, connection))


if __name__ == "__main__":
    main()
