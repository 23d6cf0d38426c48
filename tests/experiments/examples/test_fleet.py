"""Replicas behind Ray Serve: routing of conversations, and behaviour when a replica ends."""

import asyncio
import dataclasses
import importlib
import json
import sys
import types
from pathlib import Path
from unittest import mock

import pytest
import yaml

from dms_jax.command_line import serve

ROOT = Path(__file__).resolve().parents[3]


class Lost(Exception):
    """A replica has ended."""


class Full(Exception):
    """All replicas are full."""


@pytest.fixture(scope="module")
def fleet():
    """The module of the example, with exceptions and nothing else of Ray."""
    names = ("aiohttp", "ray", "ray.serve", "ray.serve.config")
    stands = {name: mock.MagicMock() for name in names}
    stands["ray"].serve = stands["ray.serve"]
    stands["ray.exceptions"] = types.SimpleNamespace(RayActorError=Lost, RayTaskError=Lost)
    stands["ray.serve.exceptions"] = types.SimpleNamespace(BackPressureError=Full)
    stands["aiohttp"].ClientError = OSError
    name = "experiments.examples.fleet"
    with mock.patch.dict(sys.modules, stands):
        sys.modules.pop(name, None)
        yield importlib.import_module(name)
    sys.modules.pop(name, None)


def key(fleet, **fields) -> str | None:
    return fleet.prefix_key(json.dumps(fields).encode())


SYSTEM = {"role": "system", "content": "You are terse."}
QUESTION = {"role": "user", "content": "Who wrote Faust?"}
MORE = [{"role": "assistant", "content": "Goethe."}, {"role": "user", "content": "When?"}]


def test_conversation_keeps_its_replica(fleet):
    for turns, name in (("messages", "instructions"), ("input", "system")):
        begun = key(fleet, model="m", **{turns: [SYSTEM, QUESTION]})
        assert begun == key(fleet, model="m", temperature=1, **{turns: [SYSTEM, QUESTION, *MORE]})
        others = [
            key(fleet, model="m", **{turns: [SYSTEM, MORE[1]]}),
            key(fleet, model="other", **{turns: [SYSTEM, QUESTION]}),
            key(fleet, model="m", **{turns: [SYSTEM, QUESTION], name: "Be kind."}),
        ]
        assert len({begun, *others}) == 4


def test_questions_on_one_document_share_a_replica(fleet):
    document = "x" * fleet.PREFIX
    assert key(fleet, prompt=document + "Why?") == key(fleet, prompt=document + "Who?")
    assert key(fleet, prompt="x" + document) == key(fleet, prompt=document)
    assert key(fleet, prompt="y" + document) != key(fleet, prompt=document)
    assert key(fleet, prompt=[1, 2, 3]) != key(fleet, prompt=[1, 2, 4])


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"7", b'{"model": "m"}', b"[" * 100_000])
def test_requests_without_a_prompt_have_no_key(fleet, body):
    assert fleet.prefix_key(body) is None


class Replicas:
    """A handle of replicas; each try gets the next one's answer in parts, or its error."""

    def __init__(self, *tries):
        self.tries, self.sessions, self.cancelled = list(tries), [], 0

    def options(self, session_id=None, **_):
        self.sessions.append(session_id)
        return self

    def remote(self, *request):
        self.request = request
        return Parts(self, iter(self.tries.pop(0)))


class Parts:
    def __init__(self, replicas, parts):
        self.replicas, self.parts = replicas, parts

    def __aiter__(self):
        return self

    async def __anext__(self):
        for part in self.parts:
            if part is asyncio.sleep:
                await asyncio.sleep(60)
            if isinstance(part, Exception):
                raise part
            return part
        raise StopAsyncIteration

    def cancel(self):
        self.replicas.cancelled += 1


STREAM = (200, {"content-type": "text/event-stream; charset=utf-8", "x-replica": "a:1"})
WHOLE = (200, {"content-type": "application/json", "x-replica": "a:1"})
EVENT = b'data: {"text": "Once"}\n\n'


def ask(fleet, replicas, path="/v1/completions", headers=None, **fields):
    """Returns the status, the headers and the body of the router's answer."""
    sent = {"type": "http.request", "body": json.dumps(fields).encode() if fields else b""}
    scope = {
        "type": "http",
        "method": "POST" if fields else "GET",
        "path": path,
        "query_string": b"",
        "headers": [(k.encode(), v.encode()) for k, v in (headers or {}).items()],
        "server": ("localhost", 8000),
    }

    async def answer():
        from starlette.requests import Request

        async def receive():
            return sent

        response = await fleet.Router(replicas)(Request(scope, receive))
        if hasattr(response, "body_iterator"):
            body = b"".join([part async for part in response.body_iterator])
        else:
            body = response.body
        return response.status_code, response.headers, body

    return asyncio.run(answer())


def test_answer_passes_through_unchanged(fleet):
    replicas = Replicas([STREAM, EVENT, EVENT])
    status, headers, body = ask(
        fleet, replicas, headers={"authorization": "Bearer k", "cookie": "c"}, prompt="Once"
    )
    assert (status, body, headers["x-replica"]) == (200, EVENT + EVENT, "a:1")
    method, path, sent, given = replicas.request
    assert (method, path, json.loads(given)) == ("POST", "/v1/completions", {"prompt": "Once"})
    assert sent == {"authorization": "Bearer k", "content-type": "application/json"}
    assert replicas.sessions[-1] == key(fleet, prompt="Once")
    replicas = Replicas([WHOLE, b"{}"])
    assert ask(fleet, replicas, headers={"x-session-id": "s"}, prompt="Once")[2] == b"{}"
    assert replicas.sessions[-1] == "s"


def test_stream_of_an_ended_replica_ends_with_an_error_event(fleet):
    replicas = Replicas([STREAM, EVENT, Lost()])
    status, _, body = ask(fleet, replicas, prompt="Once")
    assert status == 200
    assert body.startswith(EVENT)
    name, data = body.removeprefix(EVENT).decode().removesuffix("\n\n").split("\n")
    assert name == "event: error"
    event = json.loads(data.removeprefix("data: "))
    assert event["type"] == "error"  # of Anthropic's events, and of OpenAI's responses
    assert event["code"] == event["error"]["code"] == "replica_ended"
    assert "Send the request again" in event["message"]
    assert event["message"] == event["error"]["message"]
    assert not replicas.tries


def test_request_without_output_is_retried_on_another_replica(fleet):
    for tries in ([[Lost()], [STREAM, EVENT]], [[WHOLE, b"{", Lost()], [Lost()], [WHOLE, EVENT]]):
        assert ask(fleet, Replicas(*tries), prompt="Once")[::2] == (200, EVENT)
    status, headers, body = ask(fleet, Replicas(*[[Lost()]] * fleet.TRIES), prompt="Once")
    assert (status, headers["retry-after"]) == (503, "10")
    assert json.loads(body)["error"]["type"] == "server_error"


def test_full_replicas_give_429_and_missing_ones_503(fleet, monkeypatch):
    status, headers, body = ask(fleet, Replicas([Full()]), prompt="Once")
    assert (status, headers["retry-after"]) == (429, "1")
    assert json.loads(body)["error"]["type"] == "rate_limit_error"
    monkeypatch.setattr(fleet, "HEALTH_TIMEOUT", 0.01)
    replicas = Replicas([asyncio.sleep])
    assert ask(fleet, replicas, "/health")[0] == 503
    assert replicas.cancelled == 1
    assert ask(fleet, Replicas(), "/metrics")[0] == 404


def test_kubernetes_manifest_uses_known_options_and_health_probes():
    text = (ROOT / "experiments" / "launch" / "serve.yaml").read_text(encoding="utf-8")
    service, deployment = yaml.safe_load_all(text)
    pod = deployment["spec"]["template"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    (container,) = pod["spec"]["containers"]
    given = dict(each.removeprefix("--").split("=", 1) for each in container["args"])
    known = {field.name.replace("_", "-") for field in dataclasses.fields(serve.Config)}
    assert given.keys() <= known
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[name]["httpGet"] == {"path": "/health", "port": "http"}
    (port,) = container["ports"]
    assert port["containerPort"] == serve.Config().port
    pause = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    grace = pod["spec"]["terminationGracePeriodSeconds"]
    assert grace > pause + float(given["drain-seconds"])
