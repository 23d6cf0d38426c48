"""The calls between a server's processes: `EngineServer` and `EngineClient`, over one socket pair.

    client to server (HTTP to engine)     Submit, Cancel, GetSnapshot, ReplaceAdapter
    server to client (engine to HTTP)     ServedModel (first of all), Reply, Deltas, Stop

A message is its length in eight bytes, then its pickle. Messages in one direction keep their order.
A closed socket means that the other process has ended.

`EngineServer` serves a `Service` with a thread that receives, one that sends, and some that compile
grammars, for which no other message waits. The engine's thread only queues the deltas of a chunk,
and never waits for HTTP. `EngineClient` is used by the coroutines of one event loop.
"""

import asyncio
import dataclasses
import itertools
import logging
import pickle
import queue
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

from dms_jax.config import ModelConfig
from dms_jax.errors import DmsJaxError, OtherProcessError
from dms_jax.generation import Sampling
from dms_jax.generation.grammar import Grammar
from dms_jax.helper_process import start_python
from dms_jax.serving.access import Access
from dms_jax.serving.service import Delta, Listener, Service, Snapshot, notify

LENGTH = struct.Struct("!Q")
_COMPILING = 4  # grammars at a time
_BUFFER_BYTES = 2**22  # received and unread, for bursts of deltas

_logger = logging.getLogger("dms_jax")


# -- messages ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """Description of the model for the HTTP process.

    Attributes:
      models: the model names of requests, each with its adapter; None for the plain model. The
        first is the default.
      policy: name of the cache policy.
      config: configuration of the model.
      tokenizer: tokenizer of the model, with its chat template; None if it has none.
      max_tokens: the most tokens of a request, prompt and answer.
      max_requests: the most requests that can run or wait; see `Service`.
      defaults: default sampling of requests.
      seed: seed of the default seeds.
      access: who may use the server.
      call_format: name of the model's call format (`call_formats.FORMATS`); None if unknown.
      changes_adapters: whether clients may replace adapters.
    """

    models: Mapping[str, str | None]
    policy: str
    config: ModelConfig
    tokenizer: Any
    max_tokens: int
    max_requests: int
    defaults: Sampling
    seed: int
    access: Access = dataclasses.field(default_factory=Access)
    call_format: str | None = None
    changes_adapters: bool = False

    @classmethod
    def of(
        cls,
        service: Service,
        name: str,
        defaults: Sampling,
        seed: int,
        **more: Any,
    ) -> "ServedModel":
        """Describes the model of a service, called `name`, and its adapters; `more` are fields."""
        model = service.engine.model
        return cls(
            models={name if each is None else each: each for each in service.engine.adapters},
            policy=service.engine.policy.name,
            config=model.config,
            tokenizer=model.tokenizer,
            max_tokens=service.max_tokens,
            max_requests=service.max_requests,
            defaults=defaults,
            seed=seed,
            **more,
        )


@dataclasses.dataclass(frozen=True)
class Submit:
    """Submits prompts; the `Reply` is None, or the error that rejects them.

    Attributes:
      key: the client's number for this submission.
      prompts, sampling, adapter, priority: see `Service.submit`.
    """

    key: int
    prompts: list[list[int]]
    sampling: Sampling
    adapter: str | None
    priority: int


@dataclasses.dataclass(frozen=True)
class Cancel:
    """Cancels the unfinished requests of a key; there is no reply."""

    key: int


@dataclasses.dataclass(frozen=True)
class GetSnapshot:
    """Asks for the `Snapshot` of the service."""

    key: int


@dataclasses.dataclass(frozen=True)
class ReplaceAdapter:
    """Replaces an adapter by one in a directory; the `Reply` is None, or the error.

    See `Service.replace_adapter`.
    """

    key: int
    name: str
    path: str


@dataclasses.dataclass(frozen=True)
class Reply:
    """The reply to the call with the same key."""

    key: int
    value: Snapshot | Exception | None


@dataclasses.dataclass(frozen=True)
class Deltas:
    """The deltas, as plain tuples, and errors of a chunk, of all submissions, each with its key.

    Pickling hundreds of objects takes five times as long, and delays the engine's thread.
    """

    deltas: list[tuple[int, tuple[Any, ...] | Exception]]


@dataclasses.dataclass(frozen=True)
class Stop:
    """Tells HTTP to accept no more connections, and to end after the running answers."""


def pack(message: Any) -> bytes:
    """Returns a message as bytes to send."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(data)) + data


def receive(stream: BinaryIO) -> Any:
    """Returns the next message of a stream; None at its end."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    data = stream.read(length)
    return pickle.loads(data) if len(data) == length else None


async def receive_async(reader: asyncio.StreamReader) -> Any:
    """Returns the next message of a stream.

    Raises:
      EOFError: the stream has ended.
    """
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    return pickle.loads(await reader.readexactly(length))


def portable(error: Exception) -> Exception:
    """Returns an error that another process can unpickle: itself, or a RuntimeError with its text.

    Errors of this library can always be unpickled.
    """
    if isinstance(error, DmsJaxError):
        return error
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # pickling calls code of the error's class, which may raise anything
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def start_http(*sockets: socket.socket) -> subprocess.Popen[Any]:
    """Starts the HTTP process, which inherits the sockets.

    Its command line has their file descriptors. It has no device.

    Raises:
      OSError: it cannot be started.
    """
    descriptors = [each.fileno() for each in sockets]
    run = "from dms_jax.serving.http_process import main; main()"
    return start_python(
        ["-c", run, *map(str, descriptors)],
        {"JAX_PLATFORMS": "cpu"},
        pass_fds=descriptors,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )


# -- in the engine's process ---------------------------------------------------------------------


class EngineServer:
    """Serves an `EngineClient` from a service.

    Args:
      service: the service.
      connection: the connected socket.
      served: sent to the client first.
      on_disconnect: called in the receiving thread when the client has disconnected.
    """

    def __init__(
        self,
        service: Service,
        connection: socket.socket,
        served: ServedModel,
        on_disconnect: Callable[[], None],
    ):
        self._service, self._connection = service, connection
        self._on_disconnect = on_disconnect
        service.after_chunk = self._queue_deltas  # of the only server of a service
        # Key -> indices of its requests in the service; from its submission until it is cancelled.
        self._indices: dict[int, list[int]] = {}
        self._lock = threading.Lock()  # of `_indices`
        self._to_compile: queue.SimpleQueue[Submit | None] = queue.SimpleQueue()
        self._deltas: list[tuple[int, tuple[Any, ...] | Exception]] = []  # of this chunk
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._outbox.put(served)

    def start(self) -> None:
        """Starts the threads."""
        compiling = [(self._compile, "grammars")] * _COMPILING
        for target, name in ((self._receive, "receive"), (self._send, "send"), *compiling):
            threading.Thread(target=target, name=f"dms_jax {name}", daemon=True).start()

    def stop(self) -> None:
        """Stops HTTP and closes the service; returns at once."""
        self._service.close()
        self._outbox.put(Stop())

    def _receive(self) -> None:
        try:
            with self._connection.makefile("rb") as stream:
                while (message := receive(stream)) is not None:
                    self._handle(message)
        except OSError:  # the client has disconnected
            pass
        self._outbox.put(None)
        for _ in range(_COMPILING):
            self._to_compile.put(None)
        self._on_disconnect()

    def _compile(self) -> None:
        """Submits requests with grammars, which may take seconds to compile."""
        while (message := self._to_compile.get()) is not None:
            self._submit(message)

    def _handle(self, message: Submit | Cancel | GetSnapshot | ReplaceAdapter) -> None:
        match message:
            case Submit(key):
                with self._lock:
                    self._indices[key] = []
                if isinstance(message.sampling.grammar, Grammar):
                    self._to_compile.put(message)
                else:
                    self._submit(message)
            case Cancel(key):  # always the last message of a key
                with self._lock:
                    indices = self._indices.pop(key, ())
                self._service.cancel(indices)
            case GetSnapshot(key):
                self._outbox.put(Reply(key, self._service.snapshot()))
            case ReplaceAdapter():  # in a thread: it waits for requests, whose messages arrive here
                threading.Thread(target=self._replace_adapter, args=(message,), daemon=True).start()

    def _replace_adapter(self, call: ReplaceAdapter) -> None:
        error = None
        try:
            self._service.replace_adapter(call.name, call.path)
        except Exception as raised:
            error = _logged(raised)
        self._outbox.put(Reply(call.key, error))

    def _submit(self, call: Submit) -> None:
        def listen(delta: Delta | Exception) -> None:
            sent = portable(delta) if isinstance(delta, Exception) else tuple(delta)
            self._deltas.append((call.key, sent))

        indices, error = list[int](), None
        try:
            indices = self._service.submit(
                call.prompts,
                call.sampling,
                listen,
                adapter=call.adapter,
                priority=call.priority,
            )
        except Exception as raised:
            error = _logged(raised)
        with self._lock:
            cancelled = call.key not in self._indices
            if not cancelled:
                self._indices[call.key] = indices
        if cancelled:
            self._service.cancel(indices)
        self._outbox.put(Reply(call.key, error))

    def _queue_deltas(self) -> None:
        """Queues the deltas of a chunk as one message; called in the engine's thread."""
        deltas, self._deltas = self._deltas, []
        if deltas:
            self._outbox.put(Deltas(deltas))

    def _send(self) -> None:
        try:
            while (message := self._outbox.get()) is not None:
                self._connection.sendall(pack(message))
        except OSError:  # the client has disconnected, which `_receive` notices
            pass


def _logged(error: Exception) -> Exception:
    """Returns an error for HTTP; logs it unless it is one of this library's."""
    if not isinstance(error, DmsJaxError):
        _logger.error("A request failed.", exc_info=error)
    return portable(error)


# -- in the HTTP process -------------------------------------------------------------------------


@dataclasses.dataclass
class _Subscription:
    """A listener, and the number of its unfinished answers."""

    listener: Listener
    running: int


class EngineClient:
    """Calls an `EngineServer`.

    Attributes:
      on_stop: called in the loop when HTTP must end: with True if the engine's process says so,
        with False if that process has ended.
    """

    def __init__(self) -> None:
        self.on_stop: Callable[[bool], None] = lambda graceful: None
        self._keys = itertools.count()
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._subscriptions: dict[int, _Subscription] = {}
        self._disconnected = False

    async def connect(self, connection: socket.socket) -> ServedModel:
        """Takes a connected socket and waits until the engine's process has a model.

        Raises:
          EOFError: that process ended before it had one.
        """
        reader, self._writer = await asyncio.open_unix_connection(
            sock=connection, limit=_BUFFER_BYTES
        )
        served = await receive_async(reader)
        self._receiving = asyncio.create_task(self._receive(reader))
        return served

    def close(self) -> None:
        """Disconnects, which the engine's process notices."""
        self._receiving.cancel()
        self._writer.close()

    async def submit(
        self,
        prompts: list[list[int]],
        sampling: Sampling,
        listener: Listener,
        *,
        adapter: str | None = None,
        priority: int = 0,
    ) -> int:
        """Submits prompts; returns a key. Call `cancel` with it in the end.

        Args:
          prompts, sampling, adapter, priority: see `Service.submit`.
          listener: called in the loop with each `Delta`, or once with the error that ended a
            request.

        Raises:
          DmsJaxError: those of `Service.submit`; OtherProcessError if the engine's process has
            ended.
        """
        key = next(self._keys)
        self._subscriptions[key] = _Subscription(listener, len(prompts))
        try:
            await self._call(Submit(key, prompts, sampling, adapter, priority))
        except BaseException:
            self._subscriptions.pop(key, None)
            self.cancel(key)
            raise
        return key

    def cancel(self, key: int) -> None:
        """Cancels the unfinished answers; their last deltas still come."""
        if not self._disconnected:
            self._writer.write(pack(Cancel(key)))

    async def snapshot(self) -> Snapshot:
        """Returns the state of the service.

        Raises:
          OtherProcessError: the engine's process has ended.
        """
        return await self._call(GetSnapshot(next(self._keys)))

    async def replace_adapter(self, name: str, path: str) -> None:
        """Replaces an adapter and waits until it is done; raises the errors of the service."""
        await self._call(ReplaceAdapter(next(self._keys), name, path))

    async def _call(self, message: Submit | GetSnapshot | ReplaceAdapter) -> Any:
        """Sends a message and returns the value of its reply, or raises it."""
        if self._disconnected:
            raise _disconnected_error()
        reply = self._replies[message.key] = asyncio.get_running_loop().create_future()
        try:
            self._writer.write(pack(message))
            return await reply
        finally:
            del self._replies[message.key]

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                self._handle(await receive_async(reader))
        except (EOFError, OSError):
            pass
        self._disconnected = True
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(_disconnected_error())
        for subscription in self._subscriptions.values():
            notify(subscription.listener, _disconnected_error())
        self.on_stop(False)

    def _handle(self, message: Reply | Deltas | Stop) -> None:
        match message:
            case Deltas(deltas):
                for key, delta in deltas:
                    self._notify(key, delta if isinstance(delta, Exception) else Delta(*delta))
            case Reply(key, value):
                reply = self._replies.get(key)
                if reply is None or reply.done():  # the coroutine was cancelled
                    return
                if isinstance(value, Exception):
                    reply.set_exception(value)
                else:
                    reply.set_result(value)
            case Stop():
                self.on_stop(True)

    def _notify(self, key: int, delta: Delta | Exception) -> None:
        subscription = self._subscriptions.get(key)
        if subscription is None:
            return
        if isinstance(delta, Exception) or delta.completion is not None:
            subscription.running -= 1
            if not subscription.running:
                del self._subscriptions[key]
        notify(subscription.listener, delta)


def _disconnected_error() -> OtherProcessError:
    return OtherProcessError("The process of the engine has ended.")
