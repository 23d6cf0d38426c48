"""A server whose two processes are threads of this one, and an HTTP client.

They are connected like the two processes of `dms-jax serve`.
"""

import asyncio
import contextlib
import dataclasses
import functools
import http.client
import json
import socket
import threading
import time

import dms_jax
from dms_jax import assets
from dms_jax.serving import Service
from dms_jax.serving.access import Access
from dms_jax.serving.http_process import serve_http
from dms_jax.serving.rpc import EngineServer, ServedModel
from dms_jax.serving.server import take_address

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}{{ start or 'assistant' }}: {% endif %}"
)
SHAPE = dict(page_size=16, chunk=4, prefill_chunk=16)
LANES, MAX_TOKENS = 4, 160
# A short question in each API.
HELLO = [{"role": "user", "content": "Hello"}]
BODIES = {
    "/v1/completions": {"prompt": "Hello"},
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/responses": {"input": "Hello"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 9},
}
PATHS = {True: "/v1/chat/completions", False: "/v1/completions"}


@functools.cache
def stories() -> dms_jax.LanguageModel:
    """The shipped model without end tokens, so that answers reach their requested length."""
    model = dms_jax.load(assets.path("stories260k"))
    model.tokenizer.chat_template = TEMPLATE
    return dataclasses.replace(model, generation=type(model.generation)())


BOUNDED = dms_jax.TOVA(budget=24, prefill="evict_past_budget")  # rows never hold more


def make_service(policy: dms_jax.Policy = BOUNDED, model=None, **more) -> Service:
    """Returns a service, not started, over that model or a given one."""
    options = dict(num_lanes=LANES, max_tokens=MAX_TOKENS, max_waiting=8, **SHAPE)
    return Service(model or stories(), policy, **options | more)


@dataclasses.dataclass
class Client:
    """An HTTP client of a server.

    Attributes:
      port: the server's port.
      service: its service.
      engine: its engine server.
    """

    port: int
    service: Service
    engine: EngineServer

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)

    def send(self, body, *, chat=False, connection=None, path=None):
        """Returns the response to a POST."""
        connection = connection or self.connect()
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("POST", path or PATHS[chat], data)
        return connection.getresponse()

    def ask(self, *, chat=False, status=200, **body):
        """Returns the JSON answer to a request."""
        response = self.send(body, chat=chat)
        answer = json.loads(response.read())
        assert response.status == status, answer
        return answer

    def stream(self, *, chat=False, **body):
        """Returns the chunks of a streamed answer."""
        response = self.send(body | {"stream": True}, chat=chat)
        assert response.status == 200, response.read()
        assert response.getheader("Content-Type").startswith("text/event-stream")
        events = response.read().decode().split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]

    def get(self, path):
        """Returns the status and the text of a GET."""
        connection = self.connect()
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode()

    def metric(self, name, label=""):
        """Returns the sum of a metric over its labels, or over those that contain `label`."""
        lines = self.get("/metrics")[1].splitlines()
        found = [line for line in lines if line.partition(" ")[0].partition("{")[0] == name]
        assert found or label, f"there is no {name}"
        return sum(float(line.rpartition(" ")[2]) for line in found if label in line)


def served(service, **more) -> ServedModel:
    """Returns the description of a service for HTTP."""
    return ServedModel.of(service, "stories", dms_jax.Sampling(), seed=0, **more)


@contextlib.contextmanager
def connected(service, known: ServedModel):
    """A context with the port and the engine server of a service, which end in order."""
    gone = threading.Event()
    with take_address("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        ours, theirs = socket.socketpair()
        engine = EngineServer(service, ours, known, gone.set)
        engine.start()
        thread = threading.Thread(target=lambda: asyncio.run(serve_http(taken, theirs)))
        thread.start()
        try:
            yield port, engine
        finally:
            engine.stop()
            service.drain(60.0)
            thread.join(60)
            assert not thread.is_alive()
            assert gone.wait(60)
            ours.close()


@contextlib.contextmanager
def serving(
    access: Access = Access(),
    call_format: str | None = None,
    warm=False,
    changes_adapters=False,
    **more,
):
    """A context with a client of a server, which shuts down in order."""
    service = make_service(**more)
    if warm:
        service.warm()
    service.start()
    known = served(
        service, access=access, call_format=call_format, changes_adapters=changes_adapters
    )
    with connected(service, known) as (port, engine):
        yield Client(port, service, engine)


def hold_steps(client, monkeypatch) -> tuple[threading.Event, threading.Event]:
    """Returns an event that releases all chunks of steps, and one that is set when one waits."""
    runner, go_on, waits = client.service.engine.runner, threading.Event(), threading.Event()
    decode = runner.decode

    def held(*given, **more):
        waits.set()
        assert go_on.wait(60)
        return decode(*given, **more)

    monkeypatch.setattr(runner, "decode", held)
    return go_on, waits


def wait_until(true, seconds=60.0):
    """Waits until a condition is true."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never came to be"
        time.sleep(0.01)
