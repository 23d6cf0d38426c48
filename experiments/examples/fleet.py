"""Replicas of `dms-jax serve` behind Ray Serve; each conversation stays on one of them.

    serve run experiments.examples.fleet:app replicas=2 gpus=1 options="--model m --adapter a"

Clients of any API of the server talk to http://HOST:8000. Ray Serve's `ConsistentHashRouter` sends
requests with the same beginning to one replica, and to the next on its ring while that one is full.
Ray Serve replaces a replica that has ended, and replaces all in turn when `serve deploy` changes
options. The stream of an ended replica closes with an error event; a request without output is sent
to another replica. Needs the extra `fleet` and Linux.
"""

import asyncio
import contextlib
import ctypes
import hashlib
import json
import os
import re
import shlex
import signal
import socket
import sys
from collections.abc import AsyncIterator
from typing import Any

import aiohttp  # pyright: ignore[reportMissingImports]
from ray import serve  # pyright: ignore[reportMissingImports]
from ray.exceptions import (  # pyright: ignore[reportMissingImports]
    RayActorError,
    RayTaskError,
)
from ray.serve.config import RequestRouterConfig  # pyright: ignore[reportMissingImports]
from ray.serve.exceptions import BackPressureError  # pyright: ignore[reportMissingImports]
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

ADDRESS = re.compile(r" at (http://\S+)/v1$")
PREFIX = 2048  # characters of the instructions, and of the first turn, that go into the key
TRIES = 3  # most replicas tried for a request without output
HEALTH_TIMEOUT, DRAIN_SECONDS = 5.0, 30.0
END_SECONDS = 1.0  # in which a replica follows its server; errors wait for that
STREAM_SECONDS = 3600.0  # for open answers when a replica or the router shuts down
SENT = ("authorization", "x-api-key", "origin")  # request headers passed to the server
KEPT = ("content-type", "retry-after", "www-authenticate")  # response headers passed back
ENDED = (
    "The replica that wrote this answer has ended, and the rest is lost. Send the request again."
)


class ReplicaEndedError(Exception):
    """The server of a replica has ended."""


LOST = (RayActorError, RayTaskError, ReplicaEndedError)  # raised if a replica ends


class Replica:
    """A process of `dms-jax serve`, which ends with this one.

    Args:
      options: command line options.
    """

    _watching: asyncio.Task[None] | None = None

    async def __init__(
        self, options: str
    ):  # in a thread that stays, because the signal is sent when the thread ends
        self._server = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "dms_jax.command_line", "serve", "--port", "0"),
            *("--drain-seconds", str(DRAIN_SECONDS), *shlex.split(options)),
            stdout=asyncio.subprocess.PIPE,
            preexec_fn=lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL),  # PR_SET_PDEATHSIG
        )
        assert self._server.stdout is not None
        while line := (await self._server.stdout.readline()).decode():
            print(line, end="", flush=True)
            if found := ADDRESS.search(line.strip()):
                self._client = aiohttp.ClientSession(found[1], timeout=aiohttp.ClientTimeout(None))
                break
        else:
            raise ReplicaEndedError(f"dms-jax serve {options} has ended; its log says why.")
        async with self._client.get("/v1/models") as response:  # waits for requests in flight
            if response.status != 401:  # answers without a key, too
                response.raise_for_status()
        self._watching = asyncio.create_task(self._end_with_server())

    async def _end_with_server(self) -> None:
        await self._server.wait()
        os._exit(1)  # Ray sees this at once, an unhealthy replica after three checks

    async def check_health(self) -> None:
        """Raises an error unless the server admits requests; Ray then starts another replica."""
        async with asyncio.timeout(HEALTH_TIMEOUT), self._client.get("/health") as response:
            response.raise_for_status()

    async def __del__(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        with contextlib.suppress(ProcessLookupError):
            self._server.terminate()
        await self._server.wait()

    async def answer(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> AsyncIterator[Any]:
        """Yields the status and headers of a response, then its body in whole events."""
        request = self._client.request(method, path, headers=headers, data=body)
        try:
            async with request as response:
                if response.status == 503:
                    await asyncio.sleep(END_SECONDS)
                kept = {name: response.headers[name] for name in KEPT if name in response.headers}
                yield response.status, kept | {"x-replica": f"{socket.gethostname()}:{os.getpid()}"}
                rest = b""
                async for part in response.content.iter_any():
                    whole, end, rest = (rest + part).rpartition(b"\n\n")
                    if end:
                        yield whole + end
                if rest:
                    yield rest
        except aiohttp.ClientError as error:
            await asyncio.sleep(END_SECONDS)
            raise ReplicaEndedError(str(error)) from error


class Router:
    """Answers HTTP requests with the replicas' answers."""

    def __init__(self, replicas: Any):
        self._replicas = replicas.options(method_name="answer", stream=True)

    async def __call__(self, request: Request) -> Response:
        """Answers a request."""
        path, body = request.url.path, await request.body()
        if path == "/metrics":
            return refusal(404, "Ray Serve has metrics of its own; each replica has those of one.")
        key = request.headers.get("x-session-id") or prefix_key(body)
        replicas = self._replicas.options(session_id=key) if key else self._replicas
        headers = {name: request.headers[name] for name in SENT if name in request.headers}
        headers |= {"content-type": "application/json"} if body else {}
        seconds = HEALTH_TIMEOUT if path == "/health" else None
        for _ in range(TRIES):
            parts = replicas.remote(request.method, path, headers, body)
            try:
                async with asyncio.timeout(seconds):
                    status, kept = await anext(parts)
                    if not kept.get("content-type", "").startswith("text/event-stream"):
                        return Response(b"".join([part async for part in parts]), status, kept)
                return StreamingResponse(events(parts), status, kept)
            except BackPressureError:
                return refusal(429, "All replicas are full. Try again later.", retry_after="1")
            except TimeoutError:
                parts.cancel()
                return refusal(503, "No replica answers.", retry_after="10")
            except LOST:
                continue  # nothing was sent to the client yet
            except asyncio.CancelledError:  # the client has left
                parts.cancel()
                raise
        return refusal(503, f"{TRIES} replicas ended on this request.", retry_after="10")


async def events(parts: Any) -> AsyncIterator[bytes]:
    """Yields the events of an answer; the last one is an error if its replica ends."""
    try:
        async for part in parts:
            yield part
    except LOST:
        # One form for the clients of all APIs: OpenAI's chat and responses, Anthropic's messages.
        error = {"type": "server_error", "code": "replica_ended", "message": ENDED}
        data = json.dumps(error | {"type": "error", "error": error})
        yield f"event: error\ndata: {data}\n\n".encode()
    finally:
        parts.cancel()


def prefix_key(body: bytes) -> str | None:
    """Returns the routing key: a hash of the model, the instructions and the first turn.

    Each counts up to `PREFIX` characters, so a growing conversation keeps its replica, and
    questions on one document share one. None if there is no prompt.
    """
    try:
        fields = json.loads(body)
        turns = fields.get("messages") or fields.get("input") or fields.get("prompt")
    except (ValueError, AttributeError, RecursionError):
        return None
    if turns is None:
        return None
    if isinstance(turns, list) and all(isinstance(turn, dict) for turn in turns):
        first = next((i for i, turn in enumerate(turns) if turn.get("role") == "user"), 0)
        turns = turns[: first + 1]
    else:
        turns = [turns]
    parts = [fields.get(name) for name in ("model", "system", "instructions")] + turns
    opening = "\n".join(json.dumps(part, sort_keys=True)[:PREFIX] for part in parts)
    return hashlib.sha256(opening.encode()).hexdigest()


def refusal(status: int, message: str, **headers: str) -> Response:
    """Returns an error in OpenAI's form."""
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid"
    body = {"error": {"message": message, "type": kind, "param": None, "code": None}}
    return JSONResponse(body, status, {k.replace("_", "-"): v for k, v in headers.items()})


def app(arguments: dict[str, str]) -> serve.Application:
    """Returns the application of Ray Serve.

    Args:
      arguments: `options` of `dms-jax serve`, `replicas`, `gpus` and `cpus` of each, `lanes` that
        each answers at a time before requests go to the next one.
    """
    given = {"options": "", "replicas": "2", "gpus": "0", "cpus": "1", "lanes": "8"} | arguments
    replicas = serve.deployment(
        Replica,
        num_replicas=int(given["replicas"]),
        ray_actor_options={"num_gpus": float(given["gpus"]), "num_cpus": float(given["cpus"])},
        max_ongoing_requests=int(given["lanes"]),
        max_queued_requests=256,
        graceful_shutdown_timeout_s=STREAM_SECONDS,
        health_check_period_s=2,
        health_check_timeout_s=2 * HEALTH_TIMEOUT,
        request_router_config=RequestRouterConfig(
            request_router_class="ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
        ),
    )
    router = serve.deployment(
        Router,
        num_replicas=2,  # Ray Serve changes them in turn, too
        max_ongoing_requests=4096,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=STREAM_SECONDS,
    )
    return router.bind(replicas.bind(f"--lanes {given['lanes']} {given['options']}"))
