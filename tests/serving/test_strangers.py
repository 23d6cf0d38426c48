"""Clients that send too much, too slowly, or never finish do not block others."""

import asyncio
import contextlib
import gc
import http.client
import json
import logging
import os
import resource
import signal
import socket
import threading
import time

import pytest
from starlette.requests import ClientDisconnect

import dms_jax
from dms_jax.errors import DataError, TooLongError
from dms_jax.generation import requests
from dms_jax.serving import app, http_process, parsing
from dms_jax.serving.http_process import LogRateLimit, max_connections
from dms_jax.serving.parsing import Parser, RequestBody
from dms_jax.serving.service import DrainingError
from tests.serving.support import (
    MAX_TOKENS,
    hold_steps,
    make_service,
    served,
    serving,
    stories,
    wait_until,
)
from tests.support.instances import further

pytestmark = pytest.mark.usefixtures("fakes")
WORDS = "the cat "
SAY = [{"role": "user", "content": "Hi"}]


def error_of(client, body, chat=False):
    response = client.send(body, chat=chat)
    return response.status, json.loads(response.read())["error"]


# -- prompts that are too long -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chat", "fields"),
    [
        (False, dict(prompt=WORDS * 80)),  # a little too long
        (False, dict(prompt=WORDS * 1000)),  # more characters than are tokenized
        (False, dict(prompt=["a", WORDS * 1000])),
        (False, dict(prompt=[5] * MAX_TOKENS)),
        (False, dict(prompt=[5] * 513)),  # more than the model has positions
        (False, dict(prompt=[[5], [5] * 5000])),
        (False, dict(prompt=[10**6] * 3000)),  # outside the vocabulary, too
        (True, dict(messages=[{"role": "user", "content": WORDS * 80}])),
        (True, dict(messages=[{"role": "user", "content": WORDS * 1000}])),
        (True, dict(messages=[{"role": "user", "content": "a b c d"}] * 1000)),
        (
            True,
            dict(messages=[SAY[0] | {"content": [{"type": "text", "text": WORDS * 500}] * 2}]),
        ),
        (True, dict(messages=SAY, chat_template_kwargs={"start": WORDS * 1000})),
    ],
)
def test_too_long_prompt_has_openai_code(client, chat, fields):
    status, error = error_of(client, fields, chat)
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert error["param"] == ("messages" if chat else "prompt")
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_too_long_answer_has_openai_code(client, name):
    chat = name == "max_completion_tokens"
    fields = {"messages": SAY} if chat else {"prompt": "a"}
    status, error = error_of(client, fields | {name: MAX_TOKENS}, chat)
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", name)


def test_service_errors_have_openai_code():
    service = make_service()
    with pytest.raises(TooLongError, match="160 here") as error:
        service.submit([[5] * 100], dms_jax.Sampling(max_new_tokens=61), print)
    assert app._as_refusal(error.value).code == "context_length_exceeded"
    assert app._as_refusal(dms_jax.CapacityError("full")).code == "context_length_exceeded"
    assert app._as_refusal(DataError("odd")).code is None


@pytest.mark.parametrize("prompt", ["a" * 20_000, [{"role": "user", "content": "a" * 20_000}]])
def test_huge_text_is_refused_before_tokenizing(prompt, monkeypatch):
    """512 positions: at most 16,384 characters."""
    model = stories()

    def encode(*given, **more):
        raise AssertionError("it was tokenized")

    monkeypatch.setattr(type(model.tokenizer), "encode", encode)
    monkeypatch.setattr(type(model.tokenizer), "apply_chat_template", encode)
    with pytest.raises(TooLongError, match="20,000 characters, too many for the 512 tokens"):
        requests.encode_prompt(model, prompt)
    with pytest.raises(TooLongError, match="20,000 characters"):
        dms_jax.generate(model, [prompt])


def test_text_of_longest_tokens_is_accepted():
    own = stories()
    longest = max(own.tokenizer.backend.get_vocab(), key=len)
    assert len(longest) < requests.CHARACTERS_A_TOKEN
    text = longest.replace("▁", " ") * 400
    assert len(requests.encode_prompt(own, text)) <= 512


# -- bodies in turn ------------------------------------------------------------------------------


@pytest.fixture
def parser(monkeypatch) -> Parser:
    """A parser for which bodies of 1, 10, 100 and 1,000 bytes have the four sizes."""
    monkeypatch.setattr(parsing, "TINY_BODY", 1)
    monkeypatch.setattr(parsing, "SMALL_BODY", 10)
    monkeypatch.setattr(parsing, "LARGE_BODY", 100)
    return Parser(served(make_service()))


def body_of(size):
    return RequestBody(b"a" * size, "/v1/completions", seed=0)


async def stays():
    return False


async def leaves():
    return True


def test_small_bodies_are_parsed_one_at_a_time(parser, monkeypatch):
    """Many parsing threads would compete with the event loop for Python's lock."""
    running, most = [], []

    def parse(self, served):
        running.append(self)
        most.append(len(running))
        time.sleep(0.01)
        running.remove(self)

    monkeypatch.setattr(RequestBody, "parse", parse)

    async def together():
        await asyncio.gather(*(parser.parse(body_of(10), stays) for _ in range(8)))

    asyncio.run(together())
    assert most == [1] * 8


@pytest.mark.parametrize("size", [1, 10, 100, 1000])
def test_body_of_disconnected_client_is_not_parsed(parser, monkeypatch, size):
    parsed = []
    monkeypatch.setattr(RequestBody, "parse", lambda *given: parsed.append(given))
    with pytest.raises(ClientDisconnect):
        asyncio.run(parser.parse(body_of(size), leaves))
    assert not parsed
    assert all(worker._process is None for worker in parser._workers)


def test_large_bodies_do_not_delay_small_ones(parser, monkeypatch):
    together, sizes = threading.Barrier(4), [1000, 100, 10, 1]

    def parse(self, served):
        together.wait(20)
        return len(self.data)

    async def parse_in_worker(self, body):
        return await asyncio.to_thread(body.parse, None)

    async def parse_all():
        return await asyncio.gather(*(parser.parse(body_of(size), stays) for size in sizes))

    monkeypatch.setattr(RequestBody, "parse", parse)
    monkeypatch.setattr(parsing._Worker, "parse", parse_in_worker)
    parser = Parser(parser._served)
    assert asyncio.run(parse_all()) == sizes


def test_disconnect_before_parsing_is_noticed(client, monkeypatch):
    go_on, parsed, parse = threading.Event(), [], RequestBody.parse

    def held_up(self, served):
        parsed.append(self.data)
        assert go_on.wait(60)
        return parse(self, served)

    monkeypatch.setattr(RequestBody, "parse", held_up)
    bodies = [json.dumps(dict(prompt="a", max_tokens=2, user=name)).encode() for name in "abc"]
    answers = []

    def ask(body):
        answers.append(client.send(body).status)

    threads = [threading.Thread(target=ask, args=[body]) for body in bodies[::2]]
    threads[0].start()
    wait_until(lambda: parsed)
    with connected(client) as leaving:
        leaving.sendall(head(size=len(bodies[1])) + bodies[1])
        wait_until(lambda: held(client) == 2 * len(bodies[0]))
    threads[1].start()
    wait_until(lambda: held(client) == 3 * len(bodies[0]))
    go_on.set()
    for each in threads:
        each.join(60)
    assert answers == [200, 200]
    assert parsed == bodies[::2]


# -- large bodies --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def with_worker():
    """A client of a server whose worker parses bodies above 100 bytes, and that worker."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parsing, "SMALL_BODY", 100)
        parsers, init = [], Parser.__init__

        def kept(self, served):
            parsers.append(self)
            init(self, served)

        patch.setattr(Parser, "__init__", kept)
        with serving() as made:
            assert made.get("/health")[0] == 200  # it has begun
            yield made, parsers[0]._workers[0]


LARGE = dict(prompt="Once upon a time", max_tokens=3, temperature=0, user="me" * 100)


def test_large_bodies_are_parsed_in_worker(with_worker, client):
    other, own = with_worker
    assert other.ask(**LARGE)["choices"] == client.ask(**LARGE)["choices"]
    assert own._process.pid != os.getpid()
    chat = dict(messages=SAY, max_tokens=3, temperature=0, user="me" * 100)
    assert other.ask(chat=True, **chat)["choices"] == client.ask(chat=True, **chat)["choices"]
    for body in (LARGE | {"best_of": 2}, LARGE | {"model": "gpt"}, LARGE | {"prompt": WORDS * 80}):
        assert error_of(other, body) == error_of(client, body)
    assert other.send(b"[" * 10_000).status == 400


@pytest.mark.nightly
def test_parse_timeout_refuses_body_and_parses_next(with_worker, monkeypatch):
    client, own = with_worker
    client.ask(**LARGE)
    before = own._process
    before.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(parsing, "PARSE_TIMEOUT", 0.3)
    answers = []
    waits = threading.Thread(target=lambda: answers.append(error_of(client, LARGE)))
    waits.start()
    while waits.is_alive():
        start = time.monotonic()
        assert client.get("/health")[0] == 200
        assert time.monotonic() - start < 5  # others do not wait
    assert answers[0][0] == 400
    assert "more than 0.3 seconds" in answers[0][1]["message"]
    assert before.returncode == -signal.SIGKILL
    monkeypatch.undo()
    assert client.ask(**LARGE)["choices"]


@pytest.mark.nightly
def test_dead_worker_gives_503_and_restarts(with_worker):
    client, own = with_worker
    client.ask(**LARGE)
    own._process.kill()
    own._process.wait()
    status, error = error_of(client, LARGE)
    assert (status, error["type"]) == (503, "server_error")
    assert client.ask(**LARGE)["choices"]


def test_total_size_of_bodies_is_limited(client, monkeypatch):
    monkeypatch.setattr(app, "MAX_BODIES_BYTES", 100_000)
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            sends = stack.enter_context(connected(client))
            sends.sendall(head(size=10**6) + b"a" * 45_000)
        wait_until(lambda: held(client) == 90_000)
        status, error = error_of(client, LARGE | {"user": "a" * 50_000})
        assert (status, error["type"]) == (503, "server_error")
        assert "Too many large requests" in error["message"]
        assert client.ask(**LARGE)["choices"]  # small ones are read
    wait_until(lambda: held(client) == 0)


def held(client):
    """Returns the bytes of bodies that the server has not parsed."""
    return max(each._bodies_bytes for each in gc.get_objects() if isinstance(each, app._Api))


# -- connections ---------------------------------------------------------------------------------


@contextlib.contextmanager
def connected(client):
    with socket.create_connection(("127.0.0.1", client.port), timeout=30) as connection:
        yield connection


def head(path="/v1/completions", size=10):
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}\r\n\r\n".encode()


def ended(connection, seconds=30.0):
    """Returns the server's output until it closes a connection."""
    connection.settimeout(seconds)
    came = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(2**16):
            came += part
    return came


GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        GET + b"GET /he",  # of a second request
        *further(
            b"",
            b"GET /health HTTP/1.1\r\nHost: loc",
            GET.replace(b"\r\n\r\n", b"\r\nContent-Length: 999\r\n\r\n"),  # nobody reads it
            head("/nowhere", 999),
        ),
    ],
    ids=["half of a second head", "nothing", "half a head", "a body for health", "a body for 404"],
)
def test_incomplete_head_times_out(client, monkeypatch, sent):
    monkeypatch.setitem(http_process._TIMEOUTS, "head", 0.5)
    with connected(client) as connection:
        connection.sendall(sent)
        stop = threading.Event()

        def trickle():  # a slow trickle of letters
            with contextlib.suppress(OSError):
                while not stop.wait(0.2):
                    connection.sendall(b"a")

        thread = threading.Thread(target=trickle, daemon=True)
        if sent:
            thread.start()
        came = ended(connection, 10)
        stop.set()
    assert came.startswith(b"HTTP/1.1") == (b"\r\n\r\n" in sent)


def test_keep_alive_connections_are_kept(client, monkeypatch):
    monkeypatch.setitem(http_process._TIMEOUTS, "head", 0.5)
    connection = client.connect()
    end = time.monotonic() + 2.5
    while time.monotonic() < end:
        connection.request("GET", "/health")
        assert connection.getresponse().read()
        time.sleep(0.05)


def test_slow_answer_does_not_time_out(idle, monkeypatch):
    monkeypatch.setitem(http_process._TIMEOUTS, "head", 0.3)
    go_on, waits = hold_steps(idle, monkeypatch)
    answers = []
    asks = threading.Thread(target=lambda: answers.append(idle.ask(prompt="a", max_tokens=9)))
    asks.start()
    assert waits.wait(60)
    time.sleep(2.5)
    go_on.set()
    asks.join(60)
    assert answers[0]["usage"]["completion_tokens"] == 9


def test_incomplete_body_times_out(client, monkeypatch):
    monkeypatch.setattr(app, "BODY_TIMEOUT", 0.3)
    with connected(client) as connection:
        connection.sendall(head() + b"{")
        assert connection.recv(2**16).startswith(b"HTTP/1.1 408")
    wait_until(lambda: held(client) == 0)


@pytest.mark.nightly
def test_slow_receiver_times_out(client, monkeypatch):
    for phase in ("writing", "closing"):  # a request that is sent in part closes the connection
        monkeypatch.setitem(http_process._TIMEOUTS, phase, 0.5)
    made = http_process.Connection.connection_made

    def small(self, transport):
        made(self, transport)
        accepted = transport.get_extra_info("socket")
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**12)  # megabytes on some hosts

    monkeypatch.setattr(http_process.Connection, "connection_made", small)
    with connected(client) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**12)
        connection.settimeout(1)
        end, left = time.monotonic() + 30, False
        while time.monotonic() < end and not left:
            try:
                connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 50)
            except TimeoutError:
                pass
            except OSError:  # it is reset
                left = True
        assert left


def test_incomplete_requests_are_closed_when_full(monkeypatch):
    """Neither the file limit nor the number of connections may block other clients."""
    monkeypatch.setattr(http_process, "max_connections", lambda answers: (8, 4))
    with serving() as client, contextlib.ExitStack() as stack:
        for sent in (b"", b"GET", head(size=1000)) * 10:
            stack.enter_context(connected(client)).sendall(sent)
        start = time.monotonic()
        assert client.get("/health")[0] == 200
        assert client.ask(prompt="a", max_tokens=2)["choices"]
        assert time.monotonic() - start < http_process.HEAD_TIMEOUT / 2


def test_running_requests_are_kept_when_full(monkeypatch):
    monkeypatch.setattr(http_process, "max_connections", lambda answers: (3, 4))
    with serving() as client:
        go_on, waits = hold_steps(client, monkeypatch)
        answers = []
        asks = [
            threading.Thread(target=lambda: answers.append(client.ask(prompt="a", max_tokens=9)))
            for _ in range(3)
        ]
        for each in asks:
            each.start()
        assert waits.wait(60)
        wait_until(lambda: len(client.service._jobs) == 3)
        with pytest.raises((ConnectionError, http.client.HTTPException)):  # one too many
            client.get("/health")
        go_on.set()
        for each in asks:
            each.join(60)
        assert len(answers) == 3


def test_connection_limit_fits_open_files():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        most, at_a_time = max_connections(100)
        assert (most, at_a_time) == (356, 16)  # a flood of connections leaves answers their turns
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 356 + 2 * 16 + 64
        for files in (200, 80, 20):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(resource, "getrlimit", lambda which, files=files: (files, files))
                patch.setattr(resource, "setrlimit", lambda which, limits: None)
                most, at_a_time = max_connections(10_000)
                assert most >= 1 <= at_a_time
                assert files < 100 or most + 2 * at_a_time < files
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_log_rate_limit():
    limit = LogRateLimit(most=3, seconds=10.0)

    def said(place, when):
        record = logging.LogRecord("a", logging.WARNING, "file", place, "%s is odd", ("it",), None)
        record.created = when
        return record.getMessage() if limit.filter(record) else None

    told = [said(1, when) for when in (0, 1, 2, 3, 4)]
    assert told[:2] == ["it is odd"] * 2
    assert [each for each in told if each] == told[: len([each for each in told if each])]
    assert len([each for each in told if each]) <= 3
    assert said(2, 4) == "it is odd"
    assert said(1, 11) == "it is odd"


# -- the engine fails ----------------------------------------------------------------------------


class PanicError(BaseException):
    """Like that of Rust code, which is not an `Exception`."""


def fail(service, monkeypatch, error):
    def extend(*given, **more):
        raise error

    monkeypatch.setattr(service.engine.runner, "extend", extend)


@pytest.mark.parametrize("error", [PanicError("oh"), SystemExit(3)])
def test_engine_failure_ends_all_requests(monkeypatch, error):
    service, told, ends = make_service(), [], threading.Event()
    service.on_failure = ends.set
    fail(service, monkeypatch, error)
    sampling = dms_jax.Sampling(max_new_tokens=4)
    for place in range(6):  # in lanes, and in the queue
        service.submit([[5, 6]], sampling, lambda deltas, place=place: told.append((place, deltas)))
    service.start()
    assert ends.wait(60)
    service._thread.join(60)
    assert [place for place, _ in told] == [*range(6)]
    assert all(isinstance(deltas, DrainingError) for _, deltas in told)
    assert not service.snapshot().alive
    assert service.failure is error
    with pytest.raises(DrainingError, match="engine has failed"):
        service.submit([[5, 6]], sampling, told.append)
    assert service.drain(1.0)


def test_error_during_recovery_ends_engine(monkeypatch):
    """No client may wait for a thread that has ended."""
    service, told = make_service(), []
    fail(service, monkeypatch, ValueError("oh"))
    monkeypatch.setattr(service, "_recover", lambda error: 1 / 0)
    service.submit([[5, 6]], dms_jax.Sampling(max_new_tokens=4), told.append)
    service.start()
    service._thread.join(60)
    assert isinstance(service.failure, ZeroDivisionError)
    assert isinstance(told[0], DrainingError)


@pytest.mark.nightly
def test_server_ends_with_engine_failure(monkeypatch):
    from dms_jax.errors import EngineFailedError
    from dms_jax.serving.server import Server, take_address
    from tests.serving.support import Client

    with take_address("127.0.0.1", 0) as taken, Server(taken) as server:
        port = taken.getsockname()[1]
        service, answers = make_service(), []
        fail(service, monkeypatch, PanicError("the tokenizer panicked"))
        client = Client(port, service, None)  # pyright: ignore[reportArgumentType]

        def ask():
            response = client.send(dict(prompt="a", max_tokens=2))
            answers.append((response.status, json.loads(response.read())["error"]))

        thread = threading.Thread(target=ask)
        thread.start()
        service.start()
        with pytest.raises(EngineFailedError, match="PanicError: the tokenizer panicked"):
            server.serve(service, served(service), drain_seconds=60.0)
        thread.join(60)
        assert server._process.returncode == 0
    assert answers[0][0] == 503
    assert answers[0][1]["code"] == "server_draining"
    assert "engine has failed" in answers[0][1]["message"]


# -- the address ---------------------------------------------------------------------------------


def test_address_is_exclusive_from_start():
    from dms_jax.serving.server import take_address

    with take_address("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        for host in ("127.0.0.1", "0.0.0.0"):
            with pytest.raises(dms_jax.ConfigError, match=rf"--port {port}: .*in use\. Another"):
                take_address(host, port)
        # Early clients wait.
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    with take_address("127.0.0.1", port):  # at once, although a client is connected
        pass
