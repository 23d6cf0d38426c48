"""What becomes of a body: JSON is parsed, templates are rendered, texts are tokenized.

All of that holds Python's lock. So only small bodies are read in the process of HTTP, in a thread.
Large ones are read in a process of their own (`reading_process`), one after the other, in a time
that has a limit: nobody else waits for them. It starts with the first of them.
"""

import asyncio
import dataclasses
import socket
import subprocess

from starlette.concurrency import run_in_threadpool

from dms_jax.serving.messages import Served, next_message, packed
from dms_jax.serving.protocol import Ask, RefusalError, check_model, read_ask, read_body
from dms_jax.serving.starting import start

SMALL = 2**15  # bytes of a body: 20 ms of tokenizing
SECONDS = 30.0  # for a large body; 16 MB of texts take about ten
_START_SECONDS = 60.0


@dataclasses.dataclass(frozen=True)
class Body:
    """A body that is to be read.

    Attributes:
      data: as it came.
      chat: whether it is for /v1/chat/completions.
      seed: of the draws, if it gives none.
    """

    data: bytes
    chat: bool
    seed: int

    def read(self, served: Served) -> Ask:
        """Returns what is asked for.

        Raises:
          DmsJaxError: see `read_ask`.
        """
        fields = read_body(self.data)
        check_model(fields, served.name)
        return read_ask(
            fields,
            chat=self.chat,
            model=served,
            defaults=served.defaults,
            max_tokens=served.max_tokens,
            most=served.most,
            seed=self.seed,
        )


class Reader:
    """Reads bodies for what is served, for the coroutines of one event loop."""

    def __init__(self, served: Served):
        self._served, self._one = served, asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    async def read(self, body: Body) -> Ask:
        """Returns what is asked for.

        Raises:
          RefusalError: it takes too long; or the process that reads has ended.
          DmsJaxError: see `read_ask`.
        """
        if len(body.data) <= SMALL:
            return await run_in_threadpool(body.read, self._served)
        async with self._one:
            try:
                if self._process is None:
                    async with asyncio.timeout(_START_SECONDS):
                        await self._start()
                async with asyncio.timeout(SECONDS):
                    found = await self._ask(body)
            except TimeoutError:
                self.close()
                raise RefusalError(
                    f"To read this request takes more than {SECONDS:g} seconds. Send shorter "
                    "prompts, or fewer.",
                ) from None
            except (EOFError, OSError):
                self.close()
                raise RefusalError(
                    "The process that reads large requests has ended; its memory may not have "
                    "sufficed. Send shorter prompts, or fewer.",
                    status=503,
                ) from None
            except BaseException:  # its answer may still come
                self.close()
                raise
        if isinstance(found, Exception):
            raise found
        return found

    def close(self) -> None:
        """Ends the process; the next large body starts another one."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._writer.close()
            self._process = None

    async def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            process = start("reading_process", theirs)
        self._reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        self._process = process
        self._writer.write(packed(self._served))

    async def _ask(self, body: Body) -> Ask | Exception:
        self._writer.write(packed(body))
        await self._writer.drain()
        return await next_message(self._reader)
