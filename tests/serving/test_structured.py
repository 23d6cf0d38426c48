"""Structured answers of a real model over HTTP match their format."""

import dataclasses
import json
import re
import threading

import jsonschema
import pytest

import dms_jax
from dms_jax import assets
from tests.serving.support import serving
from tests.support.compilations import Compilations

pytestmark = pytest.mark.nightly
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "save", "description": "Saves.", "parameters": PERSON},
}
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }} as <tool_call>. {% endfor %}"
    "{% for m in messages %}{{ m.content }} {% endfor %}"
)
SAY = [{"role": "user", "content": "Lily"}]


@pytest.fixture(scope="module")
def client():
    """A warm server of the shipped model, with its end token and a template of tools."""
    model = dms_jax.load(assets.path("stories260k"))
    model.tokenizer.chat_template = TEMPLATE
    options = dict(max_tokens=400, call_format="hermes", warm=True)
    with serving(
        model=model, policy=dms_jax.TOVA(budget=64, prefill="evict_past_budget"), **options
    ) as made:
        yield made


def person_of(text):
    found = json.loads(text)
    jsonschema.validate(found, PERSON)
    return found


def test_structured_answers_compile_nothing(client):
    compilations, found = Compilations(), {}
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    hot = dict(temperature=1.5, max_tokens=120)
    asked = {
        "json": dict(messages=SAY, response_format=form, seed=1, **hot),
        "stream": dict(messages=SAY, response_format=form, seed=2, **hot),
        "regex": dict(messages=SAY, guided_regex=r"[a-z]{2,5}(, [a-z]{2,5})?", **hot),
        "choice": dict(messages=SAY, guided_choice=["yes", "no"], **hot),
        "tool": dict(messages=SAY, tools=[TOOL], tool_choice="required", seed=3)
        | dict(parallel_tool_calls=False, temperature=1.5, max_tokens=200),
        "free": dict(messages=SAY, seed=4, **hot),
    }

    def ask(name):
        method = client.stream if name == "stream" else client.ask
        found[name] = method(chat=True, **asked[name])

    def ask_all():
        threads = [threading.Thread(target=ask, args=(name,)) for name in asked]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)

    assert compilations.of(ask_all) == 0
    assert found.keys() == asked.keys()
    contents = {
        name: answer["choices"][0]["message"]["content"]
        for name, answer in found.items()
        if name not in ("stream", "tool")
    }
    person_of(contents["json"])
    parts = [chunk["choices"][0]["delta"].get("content", "") for chunk in found["stream"]]
    person_of("".join(parts))
    assert re.fullmatch(r"[a-z]{2,5}(, [a-z]{2,5})?", contents["regex"])
    assert contents["choice"] in ("yes", "no")
    assert contents["free"]
    (choice,) = found["tool"]["choices"]
    assert choice["finish_reason"] == "tool_calls"
    for call in choice["message"]["tool_calls"]:
        assert call["function"]["name"] == "save"
        person_of(call["function"]["arguments"])
    free = dict(asked["free"], logprobs=True)
    alone = client.ask(chat=True, **free)["choices"][0]["message"]["content"]
    assert alone == contents["free"]


def test_seeded_structured_answer_is_reproducible(client):
    asked = dict(prompt="Once", guided_json=PERSON, temperature=2, seed=5, max_tokens=120)
    texts = {client.ask(**asked)["choices"][0]["text"] for _ in range(2)}
    assert len(texts) == 1
    person_of(*texts)


def test_structured_answer_without_end_token_is_refused():
    model = dms_jax.load(assets.path("stories260k"))
    model = dataclasses.replace(model, generation=type(model.generation)())
    with serving(model=model) as client:
        error = client.ask(prompt="Once", guided_regex="a", status=400)["error"]
        assert "end token" in error["message"]
