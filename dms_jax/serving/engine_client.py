"""HTTP's side of a server: the engine of another process, for the coroutines of one event loop."""

import asyncio
import itertools
import logging
import socket
from collections.abc import Callable
from typing import Any

from dms_jax.errors import OtherProcessError
from dms_jax.generation import Sampling
from dms_jax.serving.messages import (
    Cancel,
    End,
    Look,
    News,
    Reply,
    Served,
    State,
    Submit,
    next_message,
    packed,
)
from dms_jax.serving.service import Listener, Piece, call_listener

_logger = logging.getLogger("dms_jax")
_MOST_BUFFERED = 2**22  # bytes that wait to be read, where many answers come together


class EngineClient:
    """Asks an `EngineServer` for answers.

    Attributes:
      on_end: called in the loop when HTTP is to end: with True in order, with False because the
        engine's process has gone.
    """

    def __init__(self) -> None:
        self.on_end: Callable[[bool], None] = lambda in_order: None
        self._keys = itertools.count()
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._listeners: dict[int, _Listening] = {}
        self._gone = False

    async def open(self, connection: socket.socket) -> Served:
        """Takes a connected socket and waits until there is a model.

        Returns:
          What is served.

        Raises:
          EOFError: the engine's process ended before there was a model.
        """
        reader, self._writer = await asyncio.open_unix_connection(
            sock=connection, limit=_MOST_BUFFERED
        )
        served = await next_message(reader)
        self._reading = asyncio.create_task(self._read(reader))
        return served

    def close(self) -> None:
        """Leaves the engine, which sees it."""
        self._reading.cancel()
        self._writer.close()

    async def submit(self, prompts: list[list[int]], sampling: Sampling, listener: Listener) -> int:
        """Asks for answers; returns a key to `cancel` them with, which must be done in the end.

        Args:
          prompts, sampling: see `Service.submit`.
          listener: called in the loop with each `Piece`, or once with the error that ended a
            request.

        Raises:
          DmsJaxError: those of `Service.submit`, and OtherProcessError if the engine has gone.
        """
        key = next(self._keys)
        self._listeners[key] = _Listening(listener, len(prompts))
        try:
            await self._ask(Submit(key, prompts, sampling))
        except BaseException:
            self._listeners.pop(key, None)
            self.cancel(key)
            raise
        return key

    def cancel(self, key: int) -> None:
        """Ends answers, as far as they have not ended; their last pieces still come."""
        if not self._gone:
            self._writer.write(packed(Cancel(key)))

    async def state(self) -> State:
        """Returns how the engine is.

        Raises:
          OtherProcessError: it has gone.
        """
        return await self._ask(Look(next(self._keys)))

    async def _ask(self, message: Submit | Look) -> Any:
        if self._gone:
            raise _gone()
        reply = self._replies[message.key] = asyncio.get_running_loop().create_future()
        try:
            self._writer.write(packed(message))
            return await reply
        finally:
            del self._replies[message.key]

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                self._take(await next_message(reader))
        except (EOFError, OSError):
            pass
        except Exception:  # whoever waits would wait for ever
            _logger.exception("What the engine says cannot be read.")
        self._gone = True
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(_gone())
        for listening in self._listeners.values():
            call_listener(listening.listener, _gone())
        self.on_end(False)

    def _take(self, message: Reply | News | End) -> None:
        match message:
            case News(pieces):
                for key, piece in pieces:
                    self._tell(key, piece)
            case Reply(key, value):
                reply = self._replies.get(key)
                if reply is None or reply.done():  # whoever asked was cancelled
                    return
                if isinstance(value, Exception):
                    reply.set_exception(value)
                else:
                    reply.set_result(value)
            case End():
                self.on_end(True)

    def _tell(self, key: int, piece: Piece | Exception) -> None:
        listening = self._listeners.get(key)
        if listening is None:
            return
        if isinstance(piece, Exception) or piece.completion is not None:
            listening.running -= 1
            if not listening.running:
                del self._listeners[key]
        call_listener(listening.listener, piece)


class _Listening:
    """Who listens to how many answers that run."""

    def __init__(self, listener: Listener, running: int):
        self.listener, self.running = listener, running


def _gone() -> OtherProcessError:
    return OtherProcessError("The process of the engine has ended.")
