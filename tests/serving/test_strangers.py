"""Prompts that are too long, an engine that fails, an address that is taken."""

import json
import socket
import threading

import pytest

import dms_jax
from dms_jax.errors import DataError, TooLongError
from dms_jax.generation import requests
from dms_jax.serving import app
from dms_jax.serving.service import DrainingError
from tests.serving.support import (
    MAX_TOKENS,
    make_service,
    served,
    stories,
)

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
