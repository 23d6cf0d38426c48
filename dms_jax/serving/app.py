"""`make_app`: the endpoints of the server, as an ASGI application (Starlette), and its metrics.

    POST    the addresses of `apis.APIS`   /v1/load_lora_adapter, if it is allowed
    GET     /v1/models   /health   /metrics

A request is parsed and submitted to the engine's process, whose deltas are queued for the coroutine
that answers. When a client disconnects, its answers are cancelled before the next chunk, and their
pages are freed.
"""

import asyncio
import contextlib
import functools
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from dms_jax.checks import show
from dms_jax.errors import (
    BusyError,
    CapacityError,
    CheckpointError,
    ConfigError,
    DataError,
    OtherProcessError,
    OutOfMemoryError,
    TooLongError,
    plain,
)
from dms_jax.generation import Completion
from dms_jax.generation.requests import FinishReason
from dms_jax.serving.access import Access
from dms_jax.serving.apis import APIS, parse_body
from dms_jax.serving.fields import check_field, parse_object
from dms_jax.serving.formatting import Formatter
from dms_jax.serving.refusals import TOO_LONG, RefusalError, unknown_model
from dms_jax.serving.rpc import EngineClient, ServedModel
from dms_jax.serving.service import Delta, DrainingError, DroppedError, QueueFullError, Snapshot

MAX_BODY_BYTES = 2**24
RETRY_FULL = 1  # seconds after which to retry if the queue or memory is full
RETRY_DRAINING = 10  # seconds after which to retry at a server that restarts
OUT_OF_MEMORY = (
    "The server ran out of device memory. This may not be caused by your request. Try again later; "
    "the server's log says more."
)
ENDPOINTS = f"POST {', '.join(APIS)}, and GET /v1/models, /health and /metrics"
_LOAD_FIELDS = "lora_name", "lora_path"
_LOAD = "/v1/load_lora_adapter"  # vLLM's name
_CLIENT_CLOSED = 499  # the client has disconnected; only for the metrics
_FAILED = "failed"
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
_MOST_NAMES = 256  # of unknown fields to log
_PARSING = 4  # bodies at a time: threads compete with the event loop for Python's lock

_logger = logging.getLogger("dms_jax")


def make_app(engine: EngineClient, served: ServedModel) -> Starlette:
    """Returns the ASGI application.

    Args:
      engine: connected to the engine's process.
      served: the model that is served.
    """
    api = _Api(engine, served)
    routes = [
        *(Route(path, api.answer, methods=["POST"]) for path in APIS),
        Route("/v1/models", api.get_models),
        Route("/v1/models/{name:path}", api.get_model),
        *([Route(_LOAD, api.load_adapter, methods=["POST"])] if served.changes_adapters else []),
        Route("/health", api.get_health),
        Route("/metrics", api.get_metrics),
    ]
    middleware = [Middleware(_AccessControl, access=served.access)]
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
        exception_handlers={HTTPException: _on_http_error, Exception: _on_error},
    )


class _AccessControl:
    """Refuses requests that `Access` does not allow."""

    def __init__(self, app: ASGIApp, access: Access):
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._access.check(scope["path"], Headers(scope=scope))
        except RefusalError as error:
            response = _error_response(error)
            if error.status == 401:
                response.headers["WWW-Authenticate"] = "Bearer"
            await response(scope, receive, send)
        else:
            await self._app(scope, receive, send)


class _Api:
    """The endpoints of the server, over an engine."""

    def __init__(self, engine: EngineClient, served: ServedModel):
        self._engine, self._served = engine, served
        self._seeds = random.Random(served.seed)
        self._parsing = asyncio.Semaphore(_PARSING)
        self._metrics = Metrics()
        self._created = int(time.time())
        self._unknown: set[str] = set()  # names of unknown fields already logged

    async def answer(self, request: Request) -> Response:
        """Answers a body, whole or as a stream."""
        try:
            response = await self._answer(request)
        except Exception as error:
            response = _error_response(error, APIS[request.url.path].error_body)
        self._metrics.count_request(request.url.path, response.status_code)
        return response

    async def _answer(self, request: Request) -> Response:
        start, served = time.monotonic(), self._served
        data = await _receive_body(request)
        async with self._parsing:
            if await request.is_disconnected():
                raise ClientDisconnect
            parsed = await run_in_threadpool(
                parse_body, data, request.url.path, served, self._seeds.getrandbits(32)
            )
        if isinstance(parsed, dict):
            return JSONResponse(parsed)
        self._log_unknown(parsed.asked.unknown)
        prompts = [prompt for prompt in parsed.prompts for _ in range(parsed.asked.choices)]
        deltas, begun = _DeltaQueue(len(prompts)), set()

        def listen(delta: Delta | Exception) -> None:
            deltas.put(delta)  # first: the client is answered even if counting fails
            if isinstance(delta, Exception):
                self._metrics.count_failure(delta)
                return
            if delta.tokens and delta.choice not in begun:
                begun.add(delta.choice)
                self._metrics.count_first_token(start)
            if delta.completion is not None:
                self._metrics.count_answer(delta.completion, start)

        adapter = served.models[parsed.asked.model]
        key = await self._engine.submit(
            prompts, parsed.sampling, listen, adapter=adapter, priority=parsed.asked.priority
        )
        make_formatter = APIS[request.url.path].formatter
        assert make_formatter is not None
        formatter = make_formatter(parsed, served)
        cancel = functools.partial(self._engine.cancel, key)
        if parsed.asked.stream:
            return _EventStream(deltas, formatter, cancel)
        async with _cancel_on_exit(request.receive, deltas, cancel):
            return await _whole_response(deltas, formatter)

    def _log_unknown(self, names: Iterable[str]) -> None:
        """Warns once about each unknown field."""
        new = sorted(set(names) - self._unknown)
        for name in new[: max(_MOST_NAMES - len(self._unknown), 0)]:
            self._unknown.add(name)
            _logger.warning("Ignored the unknown request field %s.", plain(name))

    async def load_adapter(self, request: Request) -> Response:
        """Replaces an adapter by one in a directory on the server's machine."""
        try:
            fields = parse_object(await _receive_body(request))
            name, path = (check_field(each, fields.get(each), str) for each in _LOAD_FIELDS)
            if self._served.models.get(name) is None:
                adapters = [each for each, own in self._served.models.items() if own is not None]
                raise RefusalError(
                    f"There is no adapter {show(name)} here to be replaced, only "
                    f"{', '.join(map(repr, adapters))}. Others are named when the server starts "
                    "(--adapter NAME=DIRECTORY).",
                    status=404,
                    param=_LOAD_FIELDS[0],
                    code="model_not_found",
                )
            await self._engine.replace_adapter(name, path)
            response = JSONResponse(self._card(name))
        except CheckpointError as error:
            response = _error_response(RefusalError(error, param=_LOAD_FIELDS[1]))
        except Exception as error:
            response = _error_response(error)
        self._metrics.count_request(_LOAD, response.status_code)
        return response

    async def get_models(self, request: Request) -> Response:
        """Lists the model and its adapters."""
        cards = [self._card(name) for name in self._served.models]
        return JSONResponse({"object": "list", "data": cards})

    async def get_model(self, request: Request) -> Response:
        """Describes the model, or an adapter."""
        name = request.path_params["name"]
        if name not in self._served.models:
            return _error_response(unknown_model(name, self._served.models))
        return JSONResponse(self._card(name))

    async def get_health(self, request: Request) -> Response:
        """Reports whether requests are admitted."""
        snapshot = await self._engine.snapshot()
        if snapshot.draining or not snapshot.alive:
            status = "draining" if snapshot.draining else "the engine has ended"
            return JSONResponse({"status": status}, 503)
        return JSONResponse({"status": "ok"})

    async def get_metrics(self, request: Request) -> Response:
        """Returns the metrics in Prometheus's text format."""
        text = self._metrics.render(await self._engine.snapshot())
        return Response(text, media_type="text/plain; version=0.0.4")

    def _card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "dms_jax",
            "max_model_len": self._served.max_tokens,
            "policy": self._served.policy,
        }


class _DeltaQueue:
    """Queues the deltas of a request, from the engine's listener for the coroutine that answers.

    Args:
      running: number of unfinished answers.
    """

    def __init__(self, running: int):
        self._running, self._deltas = running, list[Delta | Exception]()
        self._filled = asyncio.Event()

    def put(self, delta: Delta | Exception) -> None:
        """Queues a delta, or an error that ends all answers."""
        self._deltas.append(delta)
        self._filled.set()

    async def batches(self) -> AsyncIterator[list[Delta]]:
        """Yields the deltas that have come, until all answers have ended.

        Raises:
          Exception: an answer failed, or was cancelled because the server ends.
        """
        while self._running:
            await self._filled.wait()
            self._filled.clear()
            queued, self._deltas = self._deltas, []
            batch, error = [], None
            for delta in queued:
                if isinstance(delta, Exception):
                    error = delta
                    break
                if delta.completion is not None:
                    self._running -= 1
                    if delta.completion.finish_reason == "cancelled":
                        error = DrainingError("The server ended before the answer did.")
                        break
                batch.append(delta)
            yield batch
            if error is not None:
                raise error


def _check_content_type(kind: str | None) -> None:
    """Refuses bodies whose Content-Type is not JSON.

    Web pages may send other types to any server, but JSON only to servers that allow it.
    """
    if kind is not None and kind.partition(";")[0].strip().lower() != "application/json":
        raise RefusalError(
            f"The body must be JSON, and its type is {plain(kind)}. Send the header "
            "Content-Type: application/json (curl: --json in place of -d).",
            status=415,
        )


async def _receive_body(request: Request) -> bytes:
    """Returns the body, unless it is too large."""
    _check_content_type(request.headers.get("content-type"))
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise RefusalError(
                f"The body has more than {MAX_BODY_BYTES:,} bytes, the most of a request "
                "here. Send its prompts in several requests.",
                status=413,
            )
    return bytes(body)


async def _whole_response(deltas: _DeltaQueue, formatter: Formatter) -> Response:
    answers: dict[int, Completion] = {}
    async for batch in deltas.batches():
        answers |= _ended(batch)
    return JSONResponse(formatter.whole([answers[index] for index in sorted(answers)]))


def _ended(batch: Iterable[Delta]) -> dict[int, Completion]:
    """Returns the answers that a batch ends, by choice."""
    return {each.choice: each.completion for each in batch if each.completion is not None}


class _EventStream(StreamingResponse):
    """Streams answers as server-sent events, and cancels them when the stream ends."""

    def __init__(self, deltas: _DeltaQueue, formatter: Formatter, cancel: Callable[[], None]):
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        events = _events(deltas, formatter)
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._deltas, self._cancel = deltas, cancel

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with _cancel_on_exit(receive, self._deltas, self._cancel):
            await self.stream_response(send)


async def _events(deltas: _DeltaQueue, formatter: Formatter) -> AsyncIterator[str]:
    """Yields server-sent events; an error after the first one becomes the last one."""
    answers: dict[int, Completion] = {}
    yield "".join(formatter.opening())
    try:
        async for batch in deltas.batches():
            answers |= _ended(batch)
            if events := "".join(event for each in batch for event in formatter.events(each)):
                yield events
    except ClientDisconnect:
        return
    except Exception as error:
        yield "".join(formatter.failure(_as_refusal(error)))
        return
    yield "".join(formatter.closing([answers[index] for index in sorted(answers)]))


@contextlib.asynccontextmanager
async def _cancel_on_exit(
    receive: Receive, deltas: _DeltaQueue, cancel: Callable[[], None]
) -> AsyncIterator[None]:
    """Ends the request inside when its client disconnects; cancels its answers on exit.

    Args:
      receive: ASGI's `receive` after the body; returns when the client disconnects.
      deltas: the queue of the request.
      cancel: cancels the unfinished answers.
    """

    async def wait_for_disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        deltas.put(ClientDisconnect())

    waiting = asyncio.create_task(wait_for_disconnect())
    try:
        yield
    finally:
        waiting.cancel()
        cancel()


def _as_refusal(error: Exception) -> RefusalError:
    """Returns the error for the client."""
    match error:
        case RefusalError():
            return error
        case DrainingError():
            return RefusalError(
                error, status=503, code="server_draining", retry_after=RETRY_DRAINING
            )
        case QueueFullError():
            return RefusalError(
                error, status=429, code="rate_limit_exceeded", retry_after=RETRY_FULL
            )
        case BusyError():
            return RefusalError(error, status=409, retry_after=RETRY_FULL)
        case ClientDisconnect():
            return RefusalError("The client disconnected.", status=_CLIENT_CLOSED)
        case OtherProcessError():
            return RefusalError(error, status=503, retry_after=RETRY_DRAINING)
        case OutOfMemoryError():
            return RefusalError(
                OUT_OF_MEMORY, status=503, code="out_of_memory", retry_after=RETRY_FULL
            )
        case CapacityError() | TooLongError():
            return RefusalError(error, code=TOO_LONG)
        case ConfigError() | DataError():
            return RefusalError(error)
    _logger.error("A request failed.", exc_info=error)
    return RefusalError("The server failed on this request; its log says why.", status=500)


def _error_response(
    error: Exception, body_of: Callable[[RefusalError], dict[str, Any]] = RefusalError.openai_body
) -> Response:
    refusal = _as_refusal(error)
    seconds = refusal.retry_after
    headers = {} if seconds is None else {"Retry-After": str(seconds)}
    return JSONResponse(body_of(refusal), refusal.status, headers)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Formats Starlette's errors of unknown paths and methods like all others."""
    found: Any = error
    what = f"{request.method} {request.url.path}: {found.detail}. There are {ENDPOINTS}."
    response = _error_response(RefusalError(what, status=found.status_code))
    response.headers.update(found.headers or {})
    return response


async def _on_error(request: Request, error: Exception) -> Response:
    return _error_response(error)


class Metrics:
    """Counters of the server and gauges of its engine, for Prometheus."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = self._counter("requests", "HTTP requests answered", "path", "status")
        self._ended = self._counter("answers", "Answers by why they ended", "reason")
        for reason in (*get_args(FinishReason), _FAILED):  # 0 until there is one
            self._ended.labels(reason)
        self._prompt = self._counter("prompt_tokens", "Tokens of prompts of answers")
        self._hits = self._counter(
            "prefix_hits", "Answers whose prompts began with a cached prefix"
        )
        self._cached = self._counter("cached_tokens", "Tokens of prompts that were cached")
        self._new = self._counter("generation_tokens", "Tokens of answers")
        self._reads = self._counter("kv_reads", "Cache entries read, averaged over rows")
        self._first = self._histogram("first_token_seconds", "From a request to its first token")
        self._whole = self._histogram("answer_seconds", "From a request to the end of an answer")
        self._running = self._gauge("running", "Answers in lanes")
        self._waiting = self._gauge("waiting", "Answers that wait for a lane")
        self._live = self._gauge(
            "live_tokens",
            "Live cache entries of running answers, averaged over layers and KV heads",
        )
        self._in_use = self._gauge("pages_in_use", "Pages of the pool")
        self._free = self._gauge("pages_free", "Free pages of the pool, with those of prefixes")
        self._prefixes = self._gauge("prefixes", "Cached prefixes", "place")
        self._prefix_bytes = self._gauge("prefix_bytes", "Bytes of cached prefixes", "place")

    def count_request(self, path: str, status: int) -> None:
        """Counts an HTTP request."""
        self._requests.labels(path, str(status)).inc()

    def count_first_token(self, start: float) -> None:
        """Counts the first token of an answer to a request received at `start` (monotonic)."""
        self._first.observe(time.monotonic() - start)

    def count_answer(self, completion: Completion, start: float) -> None:
        """Counts a finished answer, its tokens, reads and seconds."""
        self._ended.labels(completion.finish_reason).inc()
        self._prompt.inc(completion.usage.prompt_tokens)
        self._hits.inc(completion.usage.cached_tokens > 0)
        self._cached.inc(completion.usage.cached_tokens)
        self._new.inc(completion.usage.new_tokens)
        self._reads.inc(completion.usage.kv_reads)
        self._whole.observe(time.monotonic() - start)

    def count_failure(self, error: Exception) -> None:
        """Counts an answer that an error ended."""
        self._ended.labels("cancelled" if isinstance(error, DroppedError) else _FAILED).inc()

    def render(self, snapshot: Snapshot) -> bytes:
        """Returns all metrics in Prometheus's text format."""
        self._running.set(snapshot.running)
        self._waiting.set(snapshot.waiting)
        self._live.set(snapshot.live_tokens)
        self._in_use.set(snapshot.pages_in_use)
        self._free.set(snapshot.pages_free)
        prefixes = snapshot.prefixes
        self._prefixes.labels("device").set(prefixes.states)
        self._prefixes.labels("host").set(prefixes.host_states)
        self._prefix_bytes.labels("device").set(prefixes.bytes)
        self._prefix_bytes.labels("host").set(prefixes.host_bytes)
        return generate_latest(self._registry)

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(f"dms_jax_{name}", what, labels, registry=self._registry)

    def _histogram(self, name: str, what: str) -> Histogram:
        return Histogram(f"dms_jax_{name}", what, registry=self._registry, buckets=_SECONDS)

    def _gauge(self, name: str, what: str, *labels: str) -> Gauge:
        return Gauge(f"dms_jax_{name}", what, labels, registry=self._registry)
