"""The addresses of the server, and what becomes of each request.

    POST /v1/chat/completions   POST /v1/completions   GET /v1/models   GET /health   GET /metrics

A request is read, its prompts join those that run in the engine's process, and its pieces come back
from there. A client that goes away has its answers cancelled before the next chunk, and their pages
freed.
"""

import asyncio
import contextlib
import functools
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from dms_jax.errors import (
    BusyError,
    CapacityError,
    ConfigError,
    DataError,
    OtherProcessError,
    OutOfMemoryError,
    TooLongError,
    plain,
)
from dms_jax.generation import Completion
from dms_jax.serving.access import Access
from dms_jax.serving.engine_client import EngineClient
from dms_jax.serving.messages import Served
from dms_jax.serving.metrics import Metrics
from dms_jax.serving.protocol import TOO_LONG, RefusalError, unknown_model
from dms_jax.serving.reading import SMALL, Body, Reader
from dms_jax.serving.replies import Replies, to_json
from dms_jax.serving.service import DrainingError, Piece

MOST_BYTES = 2**24  # of a body
MOST_HELD = 2**28  # of all bodies that have not been read
BODY_SECONDS = 60.0  # in which a body comes
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


def make_app(engine: EngineClient, served: Served, reader: Reader) -> Starlette:
    """Returns the ASGI application over an engine.

    Args:
      engine: answers; it is open.
      served: what it says that it serves.
      reader: of bodies.
    """
    api = _Api(engine, served, reader)
    routes = [
        Route("/v1/chat/completions", functools.partial(api.answer, chat=True), methods=["POST"]),
        Route("/v1/completions", functools.partial(api.answer, chat=False), methods=["POST"]),
        Route("/v1/models", api.models),
        Route("/v1/models/{name:path}", api.model),
        Route("/health", api.health),
        Route("/metrics", api.metrics),
    ]
    middleware = [Middleware(_Guard, access=served.access)]
    if origins := served.access.origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type"],
        )
        middleware.insert(0, cors)
    return Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={HTTPException: _of_http, Exception: _wrong},
    )


class _Guard:
    """Answers only who may ask."""

    def __init__(self, app: ASGIApp, access: Access):
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._access.check(scope["path"], Headers(scope=scope))
        except RefusalError as error:
            response = _refusal(error)
            if error.status == 401:
                response.headers["WWW-Authenticate"] = "Bearer"
            await response(scope, receive, send)
        else:
            await self._app(scope, receive, send)


class _Api:
    """The functions behind the addresses."""

    def __init__(self, engine: EngineClient, served: Served, reader: Reader):
        self.engine, self.served, self.seeds = engine, served, random.Random(served.seed)
        self.reader, self._held = reader, 0
        self.counts = Metrics()
        self.since = int(time.time())

    async def answer(self, request: Request, *, chat: bool) -> Response:
        """A chat or text completion, whole or in chunks."""
        try:
            response = await self._answer(request, chat=chat)
        except Exception as error:
            response = _refusal(error)
        self.counts.answered(request.url.path, response.status_code)
        return response

    async def _answer(self, request: Request, *, chat: bool) -> Response:
        since, served = time.monotonic(), self.served
        _check_type(request.headers.get("content-type"))
        seed = self.seeds.getrandbits(32)
        with self._holding() as take:
            ask = await self.reader.read(Body(await _body(request, take), chat, seed))
        prompts = [prompt for prompt in ask.prompts for _ in range(ask.choices)]
        news, began = _News(len(prompts)), set()

        def listen(piece: Piece | Exception) -> None:
            news.put(piece)  # first: the client is answered, whatever becomes of the counts
            if isinstance(piece, Exception):
                self.counts.failed()
            elif piece.tokens and piece.choice not in began:
                began.add(piece.choice)
                self.counts.began(since)
            if isinstance(piece, Piece) and piece.completion is not None:
                self.counts.ended(piece.completion, since)

        key = await self.engine.submit(prompts, ask.sampling, listen)
        replies = Replies(ask, chat, served.name, served.tokenizer)
        ended = functools.partial(self.engine.cancel, key)
        if ask.stream:
            return _Events(news, replies, ended)
        async with _watched(request.receive, news, ended):
            return await _whole(news, replies)

    async def models(self, request: Request) -> Response:
        """The one model, as a list."""
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        """Returns what is known of the one model that is served."""
        name = request.path_params["name"]
        if name != self.served.name:
            return _refusal(unknown_model(name, self.served.name))
        return JSONResponse(self._card())

    async def health(self, request: Request) -> Response:
        """Whether requests are taken."""
        state = await self.engine.state()
        if state.draining or not state.alive:
            status = "draining" if state.draining else "the engine has ended"
            return JSONResponse({"status": status}, 503)
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        """Returns the metrics in the text format of Prometheus."""
        text = self.counts.text(await self.engine.state())
        return Response(text, media_type="text/plain; version=0.0.4")

    def _card(self) -> dict[str, Any]:
        return {
            "id": self.served.name,
            "object": "model",
            "created": self.since,
            "owned_by": "dms_jax",
            "max_model_len": self.served.max_tokens,
            "policy": self.served.policy,
        }

    @contextlib.contextmanager
    def _holding(self) -> Iterator[Callable[[int], None]]:
        """Counts the bytes of a body that come, and forgets them when they have been read."""
        taken = 0

        def take(size: int) -> None:
            nonlocal taken
            taken += size
            self._held += size
            if taken > SMALL and self._held > MOST_HELD:
                raise RefusalError(
                    "Too many large requests are being sent at once. Try again later.",
                    status=503,
                    retry_after=FULL_SECONDS,
                )

        try:
            yield take
        finally:
            self._held -= taken


class _News:
    """The pieces of a request, from the engine's listener to the coroutine that answers.

    Args:
      running: answers that have not ended.
    """

    def __init__(self, running: int):
        self._running, self._news = running, list[Piece | Exception]()
        self._came = asyncio.Event()

    def put(self, news: Piece | Exception) -> None:
        """Takes a piece, or an error that ends all."""
        self._news.append(news)
        self._came.set()

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        """Yields the pieces of all answers, those together that have come, until all have ended.

        Raises:
          Exception: of an answer that failed, or that the end of the server cut off.
        """
        while self._running:
            await self._came.wait()
            self._came.clear()
            news, self._news = self._news, []
            pieces, error = [], None
            for piece in news:
                if isinstance(piece, Exception):
                    error = piece
                    break
                if piece.completion is not None:
                    self._running -= 1
                    if piece.completion.finish_reason == "cancelled":
                        error = DrainingError("The server ended before the answer did.")
                        break
                pieces.append(piece)
            yield pieces
            if error is not None:
                raise error


def _check_type(kind: str | None) -> None:
    """Raises RefusalError if a body is said not to be JSON.

    Pages may send other types to any server, and JSON only to those that allow it.
    """
    if kind is not None and kind.partition(";")[0].strip().lower() != "application/json":
        raise RefusalError(
            f"A body is JSON here, and this one is said to be {plain(kind)}. Send the header "
            "Content-Type: application/json (curl: --json in place of -d).",
            status=415,
        )


async def _body(request: Request, take: Callable[[int], None] = lambda size: None) -> bytes:
    """Returns the body; `take` is told of the bytes that come, and may refuse them."""
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                parts.append(part)
                size += len(part)
                take(len(part))
                if size > MOST_BYTES:
                    raise RefusalError(
                        f"The body has more than {MOST_BYTES:,} bytes, the most of a request "
                        "here. Send its prompts in several requests.",
                        status=413,
                    )
    except TimeoutError:
        raise RefusalError(
            f"The body was not there after {BODY_SECONDS:g} seconds.", status=408
        ) from None
    return b"".join(parts)


async def _whole(news: _News, replies: Replies) -> Response:
    choices: dict[int, list[Piece]] = {}
    async for pieces in news.pieces():
        for piece in pieces:
            choices.setdefault(piece.choice, []).append(piece)
    return JSONResponse(replies.whole([choices[index] for index in sorted(choices)]))


async def _events(news: _News, replies: Replies) -> AsyncIterator[str]:
    """Server-sent events; an error that comes late is the last of them."""
    completions: list[Completion] = []
    yield "".join(map(_event, replies.opening()))
    try:
        async for pieces in news.pieces():
            completions += [each.completion for each in pieces if each.completion is not None]
            chunks = [chunk for each in pieces if (chunk := replies.chunk(each)) is not None]
            if chunks:
                yield "".join(map(_event, chunks))
    except ClientDisconnect:
        return
    except Exception as error:
        yield _event(to_json(_refused(error).body))
        return
    yield "".join(map(_event, [*replies.closing(completions), "[DONE]"]))


def _event(data: str) -> str:
    return f"data: {data}\n\n"


class _Events(StreamingResponse):
    """A stream whose answers end with it, however it ends."""

    def __init__(self, news: _News, replies: Replies, ended: Callable[[], None]):
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(_events(news, replies), media_type="text/event-stream", headers=headers)
        self._news, self._ended = news, ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with _watched(receive, self._news, self._ended):
            await self.stream_response(send)


@contextlib.asynccontextmanager
async def _watched(receive: Receive, news: _News, ended: Callable[[], None]) -> AsyncIterator[None]:
    """A request that is answered inside: it ends when its client goes away, and so do its answers.

    Args:
      receive: says when the client goes away; the body was read.
      news: of the request; no more comes then.
      ended: called in the end, however it is.
    """

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        news.put(ClientDisconnect())

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()
        ended()


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
        case OtherProcessError():
            return RefusalError(error, status=503, retry_after=DRAINING_SECONDS)
        case OutOfMemoryError():
            return RefusalError(
                OUT_OF_MEMORY, status=503, code="out_of_memory", retry_after=FULL_SECONDS
            )
        case CapacityError() | TooLongError():
            return RefusalError(error, code=TOO_LONG)
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
