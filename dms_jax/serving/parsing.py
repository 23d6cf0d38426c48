"""`Parser`: request bodies are parsed, small ones in threads, large ones in worker processes.

Parsing JSON, rendering templates and tokenizing hold Python's lock, which the event loop needs too.
So only small bodies are parsed in the HTTP process. Bodies are sorted into four sizes. One of each
size is parsed at a time, so that small ones do not wait for large ones:

    tiny, small    in threads of the HTTP process
    large, huge    in a worker each, with a timeout

A body whose client has disconnected by its turn is not parsed.

A worker starts with its first body. It is sent the `ServedModel` first, then each `RequestBody`,
and answers with a `GenerationRequest`, the answer to a body that needs no model, or an error.
"""

import asyncio
import bisect
import dataclasses
import logging
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from dms_jax.errors import DmsJaxError
from dms_jax.serving.apis import APIS
from dms_jax.serving.refusals import RefusalError
from dms_jax.serving.requests import GenerationRequest, prepare
from dms_jax.serving.rpc import ServedModel, pack, portable, receive, receive_async, start_process

TINY_BODY = 2**12  # bytes; tokenizing takes 3 ms
SMALL_BODY = 2**15  # 20 ms
LARGE_BODY = 2**20  # half a second
PARSE_TIMEOUT = 30.0  # seconds for a body in a worker; 16 MB of texts take about ten
_START_TIMEOUT = 60.0

_logger = logging.getLogger("dms_jax")

# A parsed body, or the answer to a body.
Parsed = GenerationRequest | dict[str, Any]


@dataclasses.dataclass(frozen=True)
class RequestBody:
    """The body of an HTTP request.

    Attributes:
      data: its bytes.
      path: its endpoint, one of `apis.APIS`.
      seed: default seed of the sampling.
    """

    data: bytes
    path: str
    seed: int

    def parse(self, served: ServedModel) -> Parsed:
        """Parses it; raises the errors of `requests.prepare`."""
        api = APIS[self.path]
        if api.answer is not None:
            return api.answer(self.data, served)
        assert api.read is not None
        return prepare(api.read(self.data, served), served, self.seed)


class Parser:
    """Parses bodies, for the coroutines of one event loop."""

    def __init__(self, served: ServedModel):
        self._served = served
        self._workers = _Worker(served), _Worker(served)
        parsers = self._parse_here, self._parse_here, *(each.parse for each in self._workers)
        self._parsers = [(parse, asyncio.Lock()) for parse in parsers]

    async def parse(self, body: RequestBody, has_left: Callable[[], Awaitable[bool]]) -> Parsed:
        """Parses a body.

        Args:
          body: the body.
          has_left: returns whether the client has disconnected; called when the body's turn comes.

        Raises:
          ClientDisconnect: the client has disconnected.
          RefusalError: parsing takes too long, or the worker has ended.
          DmsJaxError: see `requests.prepare`.
        """
        size = bisect.bisect_left((TINY_BODY, SMALL_BODY, LARGE_BODY), len(body.data))
        parse, turn = self._parsers[size]
        async with turn:
            if await has_left():
                raise ClientDisconnect
            return await parse(body)

    def close(self) -> None:
        """Kills the worker processes; the next large body starts another one."""
        for worker in self._workers:
            worker.close()

    async def _parse_here(self, body: RequestBody) -> Parsed:
        return await run_in_threadpool(body.parse, self._served)


class _Worker:
    """A worker process that parses one body at a time."""

    def __init__(self, served: ServedModel):
        self._served = served
        self._process: subprocess.Popen[bytes] | None = None

    async def parse(self, body: RequestBody) -> Parsed:
        """Parses a body; raises the errors of `Parser.parse`."""
        try:
            if self._process is None:
                async with asyncio.timeout(_START_TIMEOUT):
                    await self._start_worker()
            async with asyncio.timeout(PARSE_TIMEOUT):
                self._writer.write(pack(body))
                await self._writer.drain()
                parsed = await receive_async(self._reader)
        except TimeoutError:
            self.close()
            raise RefusalError(
                f"Parsing this request takes more than {PARSE_TIMEOUT:g} seconds. Send shorter "
                "prompts, or fewer.",
            ) from None
        except (EOFError, OSError):
            self.close()
            raise RefusalError(
                "The process that parses large requests has ended, perhaps for lack of memory. "
                "Send shorter prompts, or fewer.",
                status=503,
            ) from None
        except BaseException:  # a late reply would be taken for the reply to the next body
            self.close()
            raise
        if isinstance(parsed, Exception):
            raise parsed
        return parsed

    def close(self) -> None:
        """Kills the process; the next body starts another one."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._writer.close()
            self._process = None

    async def _start_worker(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            process = start_process("parsing", theirs)
        self._reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        self._process = process
        self._writer.write(pack(self._served))


def main() -> None:
    """Runs the worker, until the other side disconnects or kills it.

    The command line has the file descriptor of its socket.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        stream = connection.makefile("rb")
        served = receive(stream)
        while (body := receive(stream)) is not None:
            # The HTTP process kills this worker after the timeout; the alarm is for a dead HTTP
            # process.
            signal.setitimer(signal.ITIMER_REAL, 2 * PARSE_TIMEOUT)
            answer = pack(_parse(body, served))
            signal.setitimer(signal.ITIMER_REAL, 0)
            connection.sendall(answer)


def _parse(body: RequestBody, served: ServedModel) -> Parsed | Exception:
    try:
        return body.parse(served)
    except Exception as error:
        if not isinstance(error, DmsJaxError):
            _logger.exception("A request failed.")
        return portable(error)
