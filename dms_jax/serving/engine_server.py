"""The engine's side of a server: a `Service` for another process, over a socket.

One thread reads what is asked for, and one writes: the engine's thread only leaves the pieces of a
chunk, and never waits for HTTP.
"""

import contextlib
import logging
import queue
import socket
import threading
from collections.abc import Callable
from typing import Any

from dms_jax.errors import DmsJaxError
from dms_jax.serving.messages import (
    Cancel,
    End,
    Look,
    News,
    Reply,
    Served,
    State,
    Submit,
    packed,
    portable,
    read,
)
from dms_jax.serving.service import Piece, Service

_logger = logging.getLogger("dms_jax")


class EngineServer:
    """Serves an `EngineClient` from a service.

    Args:
      service: answers.
      connection: the connected socket.
      served: what the client is told first.
      gone: called when the client has gone, in the thread that reads.
    """

    def __init__(
        self,
        service: Service,
        connection: socket.socket,
        served: Served,
        gone: Callable[[], None],
    ):
        self._service, self._connection, self._gone = service, connection, gone
        self._submitted: dict[int, list[int]] = {}  # key -> indices in the service
        self._pieces: list[tuple[int, Piece | Exception]] = []
        self._out: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._out.put(served)
        for work in (self._read, self._write):
            threading.Thread(target=work, name=f"dms_jax {work.__name__}", daemon=True).start()

    def end(self) -> None:
        """Has the client end, and the service take no more requests; returns at once."""
        self._service.refuse()
        self._out.put(End())

    # -- what comes -------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            with self._connection.makefile("rb") as stream:
                while (message := read(stream)) is not None:
                    self._take(message)
        except OSError:  # the client has gone
            pass
        except BaseException:  # whoever asks would wait for ever
            _logger.exception("What HTTP says cannot be read.")
            self._hang_up()
        self._out.put(None)
        self._gone()

    def _take(self, message: Submit | Cancel | Look) -> None:
        match message:
            case Submit(key):
                self._out.put(Reply(key, self._submit(message)))
            case Cancel(key):  # comes for whatever was submitted, and is the last of its key
                self._service.cancel(self._submitted.pop(key, ()))
            case Look(key):
                service = self._service
                state = State(service.figures, service.waiting, service.draining, service.alive)
                self._out.put(Reply(key, state))

    def _submit(self, asked: Submit) -> Exception | None:
        def listen(news: Piece | Exception) -> None:
            told = portable(news) if isinstance(news, Exception) else news
            self._pieces.append((asked.key, told))

        try:
            indices = self._service.submit(asked.prompts, asked.sampling, listen, self._deliver)
        except Exception as error:
            if not isinstance(error, DmsJaxError):
                _logger.exception("A request failed.")
            return portable(error)
        self._submitted[asked.key] = indices
        return None

    # -- in the engine's thread -------------------------------------------------------------------

    def _deliver(self) -> None:
        pieces, self._pieces = self._pieces, []
        self._out.put(News(pieces))

    # -- what goes --------------------------------------------------------------------------------

    def _write(self) -> None:
        try:
            while (message := self._out.get()) is not None:
                self._connection.sendall(packed(message))
        except OSError:  # the client has gone, which `_read` says
            pass
        except BaseException:  # as of what has no pickle; the client would wait for ever
            _logger.exception("What HTTP is to be told cannot be sent.")
            self._hang_up()

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):  # the client has done so
            self._connection.shutdown(socket.SHUT_RDWR)
