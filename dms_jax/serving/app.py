"""The addresses of the server, and what becomes of each request.

    POST /v1/chat/completions   POST /v1/completions   GET /v1/models   GET /health   GET /metrics

A request is read, its prompts join those that run, and its pieces come back through a queue. A
client that goes away has its answers cancelled before the next chunk, and their pages freed.
"""

import asyncio
import contextlib
import functools
import json
import logging
import random
import time
from collections.abc import AsyncIterator
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from dms_jax.errors import BusyError, CapacityError, ConfigError, DataError, OutOfMemoryError
from dms_jax.generation import Completion, Sampling
from dms_jax.serving.metrics import Metrics
from dms_jax.serving.protocol import RefusalError, read_ask, read_body
from dms_jax.serving.replies import Replies
from dms_jax.serving.service import DrainingError, Piece, Service

MOST_BYTES = 2**24  # of a body
FULL_SECONDS = 1  # after which a client of a full server is told to try again
DRAINING_SECONDS = 10  # the same of one that ends, and is to be started again
OUT_OF_MEMORY = (
    "The server's device ran out of memory on this request, whose mistake it need not be. Try "
    "again later; its log says more."
)
ADDRESSES = (
    "POST /v1/chat/completions, POST /v1/completions, GET /v1/models, GET /health and GET /metrics"
)
_GONE = 499  # nobody reads it, but it is counted

_logger = logging.getLogger("dms_jax")
News = Piece | Exception


def make_app(
    service: Service, *, name: str, defaults: Sampling | None = None, seed: int = 0
) -> Starlette:
    """Returns the ASGI application over a service that was started.

    Args:
      service: answers.
      name: of the model, as clients give it.
      defaults: of requests that do not say how to draw; None for `Sampling()`.
      seed: of the seeds that requests get which give none.
    """
    api = _Api(service, name, defaults or Sampling(), random.Random(seed))
    routes = [
        Route("/v1/chat/completions", functools.partial(api.answer, chat=True), methods=["POST"]),
        Route("/v1/completions", functools.partial(api.answer, chat=False), methods=["POST"]),
        Route("/v1/models", api.models),
        Route("/v1/models/{name:path}", api.model),
        Route("/health", api.health),
        Route("/metrics", api.metrics),
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: _of_http, Exception: _wrong})


class _Api:
    """The functions behind the addresses."""

    def __init__(self, service: Service, name: str, defaults: Sampling, seeds: random.Random):
        self.service, self.name, self.defaults, self.seeds = service, name, defaults, seeds
        self.counts = Metrics(service)
        self.since = int(time.time())
        self._post: _Post | None = None

    async def answer(self, request: Request, *, chat: bool) -> Response:
        """A chat or text completion, whole or in chunks."""
        try:
            response = await self._answer(request, chat=chat)
        except Exception as error:
            response = _refusal(error)
        self.counts.answered(request.url.path, response.status_code)
        return response

    async def _answer(self, request: Request, *, chat: bool) -> Response:
        since = time.monotonic()
        fields = read_body(await _body(request))
        if fields.get("model", self.name) != self.name:
            raise self._unknown(fields["model"])
        # Templates and tokenizers take their time, in which others must get their chunks.
        ask = await run_in_threadpool(
            read_ask,
            fields,
            chat=chat,
            model=self.service.engine.model,
            defaults=self.defaults,
            max_tokens=self.service.max_tokens,
            most=self.service.most,
            seed=self.seeds.getrandbits(32),
        )
        prompts = [prompt for prompt in ask.prompts for _ in range(ask.choices)]
        news: asyncio.Queue[News] = asyncio.Queue()
        post, began = self._post_of(asyncio.get_running_loop()), set()

        def listen(piece: News) -> None:
            if isinstance(piece, Exception):
                self.counts.failed()
            elif piece.tokens and piece.choice not in began:
                began.add(piece.choice)
                self.counts.began(since)
            if isinstance(piece, Piece) and piece.completion is not None:
                self.counts.ended(piece.completion, since)
            post.put(news, piece)

        indices = self.service.submit(prompts, ask.sampling, listen, post.deliver)
        replies = Replies(ask, chat, self.name, self.service.engine.model.tokenizer)
        cancel = functools.partial(self.service.cancel, indices)
        pieces = _pieces(news, len(indices))
        if ask.stream:
            return _Events(_events(pieces, replies), cancel)
        try:
            return await _unless_gone(request, _whole(pieces, replies))
        finally:
            cancel()

    async def models(self, request: Request) -> Response:
        """The one model, as a list."""
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        """Returns what is known of the one model that is served."""
        name = request.path_params["name"]
        return _refusal(self._unknown(name)) if name != self.name else JSONResponse(self._card())

    async def health(self, request: Request) -> Response:
        """Whether requests are taken."""
        if self.service.draining or not self.service.alive:
            status = "draining" if self.service.draining else "the engine has ended"
            return JSONResponse({"status": status}, 503)
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        """Returns the metrics in the text format of Prometheus."""
        return Response(self.counts.text(), media_type="text/plain; version=0.0.4")

    def _post_of(self, loop: asyncio.AbstractEventLoop) -> "_Post":
        if self._post is None or self._post.loop is not loop:
            self._post = _Post(loop)
        return self._post

    def _card(self) -> dict[str, Any]:
        return {
            "id": self.name,
            "object": "model",
            "created": self.since,
            "owned_by": "dms_jax",
            "max_model_len": self.service.max_tokens,
            "policy": self.service.engine.policy.name,
        }

    def _unknown(self, name: Any) -> RefusalError:
        return RefusalError(
            f"There is no model {name!r} here, only {self.name!r}.",
            status=404,
            param="model",
            code="model_not_found",
        )


class _Post:
    """Brings pieces from the engine's thread into an event loop, those of a chunk together.

    Each time the loop is woken costs a system call and a change of threads, twice.

    Attributes:
      loop: the loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop = loop
        self._pieces: list[tuple[asyncio.Queue[News], News]] = []

    def put(self, queue: asyncio.Queue[News], piece: News) -> None:
        """Takes a piece for a queue of the loop; called in the engine's thread."""
        self._pieces.append((queue, piece))

    def deliver(self) -> None:
        """Has the loop put what was taken into its queues; called in the engine's thread."""
        pieces, self._pieces = self._pieces, []
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self.loop.call_soon_threadsafe(self._put, pieces)

    @staticmethod
    def _put(pieces: list[tuple[asyncio.Queue[News], News]]) -> None:
        for queue, piece in pieces:
            queue.put_nowait(piece)


async def _body(request: Request) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        parts.append(part)
        size += len(part)
        if size > MOST_BYTES:
            raise RefusalError(
                f"The body has more than {MOST_BYTES:,} bytes, the most of a request here. Send "
                "its prompts in several requests.",
                status=413,
            )
    return b"".join(parts)


async def _pieces(news: asyncio.Queue[News], count: int) -> AsyncIterator[Piece]:
    """The pieces of all choices as they come, until every one has ended.

    Raises:
      Exception: of an answer that failed, or that the end of the server cut off.
    """
    while count:
        piece = await news.get()
        if isinstance(piece, Exception):
            raise piece
        if piece.completion is not None:
            count -= 1
            if piece.completion.finish_reason == "cancelled":
                raise DrainingError("The server ended before the answer did.")
        yield piece


async def _whole(pieces: AsyncIterator[Piece], replies: Replies) -> Response:
    choices: dict[int, list[Piece]] = {}
    async for piece in pieces:
        choices.setdefault(piece.choice, []).append(piece)
    return JSONResponse(replies.whole([choices[index] for index in sorted(choices)]))


async def _events(pieces: AsyncIterator[Piece], replies: Replies) -> AsyncIterator[str]:
    """Server-sent events; an error that comes late is the last of them."""
    completions: list[Completion] = []
    for chunk in replies.opening():
        yield _event(chunk)
    try:
        async for piece in pieces:
            if piece.completion is not None:
                completions.append(piece.completion)
            if (chunk := replies.chunk(piece)) is not None:
                yield _event(chunk)
    except Exception as error:
        yield _event(_refused(error).body)
        return
    for chunk in replies.closing(completions):
        yield _event(chunk)
    yield "data: [DONE]\n\n"


def _event(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n"


class _Events(StreamingResponse):
    """A stream whose answers end with it, however it ends."""

    def __init__(self, events: AsyncIterator[str], ended: Any):
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._ended()


async def _unless_gone(request: Request, answer: Any) -> Response:
    """Awaits an answer, as long as its client does."""

    async def gone() -> Response:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        return Response(status_code=_GONE)

    tasks = [asyncio.create_task(answer), asyncio.create_task(gone())]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return (tasks[0] if tasks[0] in done else tasks[1]).result()
    finally:
        for task in tasks:
            task.cancel()


def _refused(error: Exception) -> RefusalError:
    """What a client is told of an error."""
    match error:
        case RefusalError():
            return error
        case DrainingError():
            return RefusalError(
                error, status=503, code="server_draining", retry_after=DRAINING_SECONDS
            )
        case BusyError():
            return RefusalError(
                error, status=429, code="rate_limit_exceeded", retry_after=FULL_SECONDS
            )
        case ClientDisconnect():
            return RefusalError("The client went away.", status=_GONE)
        case OutOfMemoryError():
            return RefusalError(
                OUT_OF_MEMORY, status=503, code="out_of_memory", retry_after=FULL_SECONDS
            )
        case CapacityError():
            return RefusalError(error, code="context_length_exceeded")
        case ConfigError() | DataError():
            return RefusalError(error)
    _logger.error("A request failed.", exc_info=error)
    return RefusalError("The server failed on this request; its log says why.", status=500)


def _refusal(error: Exception) -> Response:
    refused = _refused(error)
    again = refused.retry_after
    headers = {} if again is None else {"Retry-After": str(again)}
    return JSONResponse(refused.body, refused.status, headers)


async def _of_http(request: Request, error: Exception) -> Response:
    """An address or a method that there is not, in the form of the other errors."""
    wrong: Any = error
    what = f"{request.method} {request.url.path}: {wrong.detail}. There are {ADDRESSES}."
    response = _refusal(RefusalError(what, status=wrong.status_code))
    response.headers.update(wrong.headers or {})
    return response


async def _wrong(request: Request, error: Exception) -> Response:
    return _refusal(error)
