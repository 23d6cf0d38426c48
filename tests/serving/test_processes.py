"""The two processes of a server: messages arrive, and neither process outlives the other."""

import contextlib
import http.client
import inspect
import os
import pickle
import signal
import socket
import threading
import time

import jax
import pytest

import dms_jax
from dms_jax import errors
from dms_jax.generation.requests import NotNumbersError
from dms_jax.serving.refusals import RefusalError
from dms_jax.serving.rpc import EngineServer, portable
from dms_jax.serving.server import Server, take_address
from dms_jax.serving.service import DrainingError, QueueFullError
from tests.serving.support import Client, hold_steps, make_service, served, wait_until
from tests.support.instances import further

pytestmark = pytest.mark.usefixtures("fakes")
PROMPT = dict(prompt="Once upon a time", temperature=0)
OURS = [
    kind
    for kind in (*vars(errors).values(), DrainingError, QueueFullError)
    if inspect.isclass(kind) and issubclass(kind, dms_jax.DmsJaxError)
]


@contextlib.contextmanager
def started():
    """The HTTP process and its port, before it has a model."""
    with take_address("127.0.0.1", 0) as taken, Server(taken) as server:
        taken.listen()
        yield server, taken.getsockname()[1]


@contextlib.contextmanager
def answering():
    """A client of an HTTP process with a service; both shut down in order."""
    gone = threading.Event()
    with started() as (server, port):
        service = make_service()
        service.start()
        engine = EngineServer(service, server._connection, served(service), gone.set)
        engine.start()
        yield Client(port, service, engine), server._process
        engine.stop()
        assert service.drain(60.0)
        assert server._process.wait(60) == 0
        assert gone.wait(60)


@pytest.fixture(scope="module")
def both():
    """A client, and the HTTP process that answers it."""
    with answering() as made:
        yield made


def asked(client, answers, index, **body):
    """Streams an answer and returns its text and chunks."""
    chunks = client.stream(chat=index % 2 == 1, **body)
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    texts = [each.get("text", each.get("delta", {}).get("content")) or "" for each in choices]
    answers[index] = "".join(texts), chunks


def test_concurrent_streams_equal_single_answers(both):
    """Multi-byte characters, log-probabilities, chats and completions, all together."""
    client, _ = both
    hot = dict(temperature=30, max_tokens=60)

    def body(index):
        if index % 2:
            return hot | dict(
                messages=[{"role": "user", "content": "Zoë 🐈"}], logprobs=True, seed=index
            )
        return hot | dict(prompt=f"Lily {index}", logprobs=1, seed=index)

    answers: dict[int, tuple] = {}
    threads = [
        threading.Thread(target=asked, args=(client, answers, index), kwargs=body(index))
        for index in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(answers) == 12
    assert any(ord(char) > 127 for text, _ in answers.values() for char in text)
    for index, (text, chunks) in answers.items():
        (whole,) = client.ask(chat=index % 2 == 1, **body(index))["choices"]
        assert text == (whole["message"]["content"] if index % 2 else whole["text"])
        told = [
            logged
            for chunk in chunks
            for choice in chunk["choices"]
            if (logprobs := choice["logprobs"]) is not None
            for logged in (
                [each["logprob"] for each in logprobs["content"]]
                if index % 2
                else logprobs["token_logprobs"]
            )
        ]
        kept = whole["logprobs"]
        kept = (
            [each["logprob"] for each in kept["content"]] if index % 2 else kept["token_logprobs"]
        )
        assert told == pytest.approx(kept, abs=1e-4)
        assert len(told) == 60


def test_health_answers_while_the_server_starts_and_requests_wait():
    gone, answers = threading.Event(), []
    with started() as (server, port):
        service = make_service()
        client = Client(port, service, None)
        assert client.get("/health") == (503, '{"status":"starting"}')
        early = threading.Thread(target=lambda: answers.append(client.ask(max_tokens=3, **PROMPT)))
        early.start()
        assert client.get("/health") == (503, '{"status":"starting"}')
        service.start()
        engine = EngineServer(service, server._connection, served(service), gone.set)
        engine.start()
        early.join(60)
        assert answers[0]["usage"]["completion_tokens"] == 3
        assert client.get("/health") == (200, '{"status":"ok"}')
        engine.stop()
        assert service.drain(60.0)
        assert server._process.wait(60) == 0


def test_engine_errors_have_their_status(both, monkeypatch):
    client, _ = both
    raised: list[Exception] = []

    def refuse(*_, **__):
        raise raised[0]

    monkeypatch.setattr(client.service, "submit", refuse)
    wrong = NotNumbersError("NaN at token 3", {1})
    for error, status, words in (
        (dms_jax.CapacityError("it is full"), 400, "it is full"),
        (dms_jax.DataError("too long"), 400, "too long"),
        (QueueFullError("12 wait"), 429, "12 wait"),
        (DrainingError("it ends"), 503, "it ends"),
        (dms_jax.OutOfMemoryError("5 bytes"), 503, "ran out of device memory"),
        (wrong, 500, "its log says why"),
        (ValueError("oh"), 500, "its log says why"),
    ):
        raised[:] = [error]
        answer = client.ask(status=status, max_tokens=3, **PROMPT)
        assert words in answer["error"]["message"]


def test_own_errors_are_portable():
    assert len(OURS) > 5
    for kind in OURS:
        error = kind("what\nwas wrong")
        error.finished = {1: "done"}
        other = pickle.loads(pickle.dumps(portable(error)))
        assert (type(other), str(other), vars(other)) == (kind, str(error), vars(error))


def test_errors_with_own_constructors_are_portable():
    numbers = pickle.loads(pickle.dumps(portable(NotNumbersError("NaN", [3, 5]))))
    assert (type(numbers), str(numbers), numbers.indices) == (NotNumbersError, "NaN", {3, 5})
    refused = pickle.loads(pickle.dumps(RefusalError("no", status=413, code="c", retry_after=2)))
    assert (refused.status, refused.code, refused.retry_after) == (413, "c", 2)
    assert refused.openai_body()["error"]["message"] == "no"


def test_foreign_errors_are_portable():
    class LocalError(Exception):
        pass

    class TwoPartsError(Exception):
        def __init__(self, first, second):
            super().__init__(f"{first} {second}")

    memory = pickle.loads(pickle.dumps(portable(jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED"))))
    assert isinstance(memory, jax.errors.JaxRuntimeError)
    for error, words in ((LocalError("a"), "LocalError: a"), (TwoPartsError(1, 2), "1 2")):
        other = pickle.loads(pickle.dumps(portable(error)))
        assert type(other) is RuntimeError
        assert words in str(other)


@pytest.mark.nightly
def test_http_ends_if_engine_dies_before_loading():
    with started() as (server, port):
        waiting, other = (http.client.HTTPConnection("127.0.0.1", port, timeout=60) for _ in "ab")
        waiting.request("GET", "/v1/models")
        other.request("GET", "/health")  # the first one has been accepted before
        assert other.getresponse().status == 503
        server._connection.shutdown(socket.SHUT_RDWR)
        answer = waiting.getresponse()
        assert (answer.status, b"ended before it was ready" in answer.read()) == (503, True)
        assert server._process.wait(60) == 0
        waiting.close()
        other.close()


def test_http_ends_despite_half_a_request():
    with started() as (server, port), socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
        other = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        other.request("GET", "/health")  # the first one has been accepted before
        assert other.getresponse().status == 503
        other.close()
        server._connection.shutdown(socket.SHUT_RDWR)
        assert server._process.wait(60) == 0


def test_http_notifies_clients_if_engine_dies(monkeypatch):
    with started() as (server, port):
        service = make_service()
        engine = EngineServer(service, server._connection, served(service), lambda: None)
        engine.start()
        client = Client(port, service, engine)
        go_on, _ = hold_steps(client, monkeypatch)
        service.start()
        response = client.send(PROMPT | dict(max_tokens=9, stream=True))
        server._connection.shutdown(socket.SHUT_RDWR)
        (event,) = response.read().decode().split("\n\n")[:-1]
        assert "The process of the engine has ended." in event
        assert server._process.wait(60) == 0
        go_on.set()
        assert service.drain(60.0)


def serve(server, service, begin, ended):
    """Serves in the main thread while `begin` runs in another thread until the server has ended."""
    service.start()
    thread = threading.Thread(target=begin)
    thread.start()
    try:
        return server.serve(service, served(service), drain_seconds=60.0)
    finally:
        ended.set()
        thread.join(60)


def test_server_fails_if_http_dies():
    with started() as (server, port):
        service, ended, noticed = make_service(), threading.Event(), []

        def kill():
            wait_until(lambda: Client(port, service, None).get("/health")[0] == 200)
            server._process.kill()
            noticed.append(ended.wait(20))
            if not noticed[0]:
                os.kill(os.getpid(), signal.SIGTERM)

        with pytest.raises(dms_jax.OtherProcessError, match=r"has ended \(status -9\)"):
            serve(server, service, kill, ended)
        assert noticed == [True]
        assert not service.snapshot().alive


@pytest.mark.parametrize("signals", [["SIGINT"], *further(["SIGTERM"], ["SIGINT", "SIGINT"])])
def test_only_second_interrupt_skips_drain(signals, monkeypatch):
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with started() as (server, port):
        service, go_on, ended, told = make_service(), threading.Event(), threading.Event(), []
        drain = service.drain

        def slow(seconds):
            assert not seconds or go_on.wait(60)
            told.append(seconds)
            return drain(seconds)

        def tell():
            client = Client(port, service, None)
            try:
                told.append(client.get("/health")[0])
                # The HTTP process may get the signal first, from a supervisor of both, and ignores
                # it.
                os.kill(server._process.pid, getattr(signal, signals[0]))
                time.sleep(0.5)
                told.append(client.get("/health")[0])
            finally:
                for name in signals if not ended.is_set() else ():
                    os.kill(os.getpid(), getattr(signal, name))
                    wait_until(lambda: service.draining)
            if len(signals) == 1:
                go_on.set()

        monkeypatch.setattr(service, "drain", slow)
        ends = (
            contextlib.nullcontext() if signals == ["SIGTERM"] else pytest.raises(KeyboardInterrupt)
        )
        drained = None
        with ends:
            drained = serve(server, service, tell, ended)
        assert drained is (True if signals == ["SIGTERM"] else None)
        assert told == [200, 200, 60.0 if len(signals) == 1 else 0.0]
        assert not service.snapshot().alive
        go_on.set()
    assert before == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    assert len(signals) == 2 or server._process.returncode == 0
