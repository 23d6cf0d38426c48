"""Unsupported requests get a clear error in OpenAI's form, and nothing runs."""

import dataclasses
import json

import pytest

from dms_jax.errors import ConfigError
from dms_jax.generation import Sampling
from dms_jax.serving.apis import parse_body
from tests.serving.support import make_service, served

MANY = "Once upon a time " * 60
SAY = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}

# chat or not, fields, the field named in the error, words of the message
REFUSED = [
    (False, dict(prompt="a", repetition_penalty=1.1), "repetition_penalty", "not supported"),
    (False, dict(prompt="a", tools=[TOOL]), "tools", "/v1/chat/completions takes tools"),
    (False, dict(prompt="a", max_token=1), "max_token", "did you mean max_tokens"),
    (False, dict(prompt="a", temperature=-1), "temperature", "at least 0"),
    (False, dict(prompt="a", temperature="hot"), "temperature", "a finite number"),
    (False, dict(prompt="a", top_p=0), "top_p", "above 0"),
    (False, dict(prompt="a", n=0), "n", "at most 128"),
    (False, dict(prompt="a", seed=-1), "seed", "at least 0"),
    (False, dict(prompt="a", stop=[""]), "stop", "none of them empty"),
    (False, dict(prompt="a", stop=["a"] * 17), "stop", "up to 16"),
    (False, dict(prompt="a", stop=["a", "b" * 1025]), "stop", "longer than 1,024"),
    (False, dict(prompt="a", logprobs=5), "logprobs", "0 or 1"),
    (True, dict(messages=SAY, echo=True), "echo", "not supported"),
    (False, dict(prompt="a", echo=True, stream=True), "echo", "with a stream"),
    (False, dict(prompt=["a", "b"], echo=True), "echo", "several prompts"),
    (False, dict(prompt="a", echo=True, n=2), "echo", "several answers"),
    (False, dict(prompt="a", echo=True, guided_regex="a"), "echo", "structured answers"),
    (False, dict(prompt="a", echo=True, stop="a"), "echo", "stop strings"),
    (False, dict(prompt=[5] * 160, echo=True, max_tokens=1), "prompt", "at most 159"),
    (False, dict(prompt="a", max_tokens=0), "max_tokens", "at least 1"),
    (False, dict(prompt=[5], max_tokens=0, echo=True), "max_tokens", "more tokens than one"),
    (False, dict(prompt="a", presence_penalty=0.5), "presence_penalty", "not supported"),
    (False, dict(prompt="a", stream_options={"include_usage": True}), "stream_options", "stream="),
    (False, dict(), "prompt", "missing"),
    (False, dict(prompt=""), None, "empty string"),
    (False, dict(prompt=[]), "prompt", "a text, a list of token ids"),
    (False, dict(prompt=[10**6]), None, "10"),
    (False, dict(prompt=SAY), "prompt", "/v1/chat/completions"),
    (False, dict(prompt=MANY), "prompt", "at most 159"),
    (False, dict(prompt="a", max_tokens=159), "max_tokens", "160 here. Ask for at most 158"),
    (True, dict(messages=[]), "messages", "not empty"),
    (True, dict(messages=[{"role": "user"}]), "messages", "role and content"),
    (True, dict(messages=[{"role": "critic", "content": "x"}]), "messages", "role must be system"),
    (True, dict(messages=[{"role": "assistant", "tool_calls": 1}]), "messages", "list of calls"),
    (True, dict(messages=[SAY[0] | {"function_call": {"name": "f"}}]), "messages", "function_call"),
    (
        True,
        dict(messages=[{"role": "user", "content": [{"type": "image_url"}]}]),
        "messages",
        "parts of type text",
    ),
    (True, dict(messages=SAY, functions=[{"name": "f"}]), "functions", "send tools"),
    (True, dict(messages=SAY, response_format={"type": "xml"}), "response_format", "json_schema"),
    (True, dict(messages=SAY, best_of=2), "best_of", "n gives all of them"),
    (False, dict(prompt="a", min_tokens=3), "min_tokens", "ignore_eos with max_tokens"),
    (False, dict(prompt="a", ignore_eos=1), "ignore_eos", "ignore_eos"),
    (False, dict(prompt="a", ignore_eos=True, guided_regex="a"), "ignore_eos", "grammar"),
    (False, dict(prompt="a", ignore_eos=True, echo=True), "ignore_eos", "echo"),
    (True, dict(messages=SAY, top_logprobs=3), "top_logprobs", "chosen token"),
    (True, dict(messages=SAY, prompt="a"), "prompt", "/v1/completions takes a prompt"),
    (True, dict(messages=SAY, chat_template_kwargs={"messages": []}), "chat_template_kwargs", ""),
    (True, dict(messages=SAY, chat_template_kwargs={"self": 1}), "chat_template_kwargs", "sets it"),
    (True, dict(messages=SAY, chat_template_kwargs={"template": "a"}), "chat_template_kwargs", ""),
    (True, dict(messages=SAY, chat_template_kwargs=[1]), "chat_template_kwargs", "got [1]"),
    (True, dict(messages=[SAY[0] | {"content": "\ud800"}]), "messages", "surrogate"),
    (True, {"messages": SAY, "temperatur\ud800": 1}, r"temperatur\ud800", "surrogate"),
    (True, dict(messages=SAY, user={"a": ["\ud800"]}), "user", "surrogate"),
    (False, dict(prompt="\ud800"), "prompt", "surrogate"),
    (False, dict(prompt="a", guided_regex="\ud800"), "guided_regex", "surrogate"),
    (False, dict(prompt="a", guided_choice=["\ud800"]), "guided_choice", "surrogate"),
    (False, dict(prompt=["a", 5]), None, "Prompt 1 must be a string"),
    (False, dict(prompt=["a", {"role": "user"}]), "prompt", "/v1/chat/completions"),
    (True, dict(messages=[SAY[0] | {"content": [{"type": []}]}]), "messages", "parts of type"),
]


@pytest.mark.parametrize(("chat", "fields", "param", "words"), REFUSED)
def test_unsupported_fields_are_refused(client, chat, fields, param, words):
    error = client.ask(chat=chat, status=400, **fields)["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert words in error["message"]


def test_missing_chat_template_names_completions(client, monkeypatch):
    from dms_jax.serving.refusals import RefusalError

    model = client.service.engine.model
    monkeypatch.setattr(model.tokenizer, "chat_template", None)
    data, own = json.dumps(dict(messages=SAY)).encode(), served(client.service)
    with pytest.raises(RefusalError, match="send the text as prompt to /v1/completions") as refused:
        parse_body(data, "/v1/chat/completions", own, seed=0)
    assert refused.value.param == "messages"


def test_echo_may_fill_sequence_and_ignores_server_stops(client):
    own = served(client.service)
    own = dataclasses.replace(own, defaults=Sampling(stop=("a",)))
    for more, stop, count in ((dict(echo=True, max_tokens=0), (), 159), ({}, ("a",), 1)):
        body = dict(prompt=[5] * (160 if more else 159)) | more
        parsed = parse_body(json.dumps(body).encode(), "/v1/completions", own, seed=0)
        assert (parsed.sampling.stop_strings, parsed.sampling.max_new_tokens) == (stop, count)


@pytest.mark.usefixtures("fakes")
def test_neutral_fields_are_accepted(idle):
    neutral = dict(presence_penalty=0, logit_bias={}, tools=[], user="me", suffix=None, stop=None)
    assert idle.ask(chat=True, messages=SAY, max_tokens=1, **neutral)["choices"]


@pytest.mark.parametrize("body", [b"{", b"\xff", b"[1]", b'"a"', b"[" * 100_000])
def test_body_must_be_json_object(client, body):
    response = client.send(body)
    error = json.loads(response.read())["error"]
    assert response.status == 400
    assert "JSON" in error["message"]


def test_large_bodies_and_unknown_addresses(client):
    response = client.send(b'"' + b"a" * 2**24 + b'"')
    assert response.status == 413
    assert json.loads(response.read())["error"]["message"] == (
        "The body has more than 16,777,216 bytes, the most of a request here. Send its prompts in "
        "several requests."
    )
    error = client.ask(prompt="a", model="gpt", status=404)["error"]
    assert error["code"] == "model_not_found"
    long = client.ask(prompt="a", model="gpt" * 10**5, status=404)["error"]
    assert len(long["message"]) < 200
    assert "only 'stories'" in error["message"]
    status, text = client.get("/v1/chat")
    error = json.loads(text)["error"]
    assert (status, error["type"]) == (404, "invalid_request_error")
    assert error["message"].startswith("GET /v1/chat: Not Found. There are POST /v1/chat/comp")
    assert client.get("/v1/completions")[0] == 405
    assert client.get("/v1/models/gpt")[0] == 404


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        (dict(prompt=["a"] * 13), "prompt", "13 answers (13 prompts, n=1)"),
        (dict(prompt="a", n=13), "n", "13 answers (1 prompt, n=13)"),
        (
            dict(prompt=[[1, 2]] * 2**20, n=128),
            "n",
            "134,217,728 answers (1,048,576 prompts, n=128)",
        ),
    ],
    ids=["prompts", "choices", "both"],
)
def test_too_many_answers_are_refused_before_tokenizing(client, monkeypatch, fields, param, said):
    """A body of a few megabytes must not become lists of a hundred million prompts."""
    from dms_jax.serving import requests

    def read(*arguments, **options):
        raise AssertionError("a prompt was read")

    monkeypatch.setattr(requests, "encode_prompt", read)
    error = client.ask(status=400, **fields)["error"]
    assert error["param"] == param
    assert error["message"] == (
        f"{said} are requested at once, and at most 12 can run or wait here. Ask for fewer."
    )


def test_models_and_health(client):
    (card,) = json.loads(client.get("/v1/models")[1])["data"]
    assert (card["id"], card["max_model_len"], card["policy"]) == ("stories", 160, "TOVA")
    assert json.loads(client.get("/v1/models/stories")[1]) == card
    assert client.get("/health") == (200, '{"status":"ok"}')


@pytest.mark.parametrize(
    ("tokens", "rule"),
    [(1, "at least 2, .* got 1"), (100_000, "at most the model's 512 positions")],
)
def test_max_tokens_is_checked(tokens, rule):
    with pytest.raises(ConfigError, match=f"Service: max_tokens must be {rule}"):
        make_service(max_tokens=tokens)
