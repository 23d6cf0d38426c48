"""Two hundred JSON schemas of every supported kind: all answers are valid.

The package jsonschema judges them, independently of grammars.
"""

import dataclasses
import json
import random

import jsonschema
import llguidance
import numpy as np
import pytest

import dms_jax
from dms_jax.generation import Sampling, grammar
from dms_jax.generation.grammar import Grammar
from tests.generation.support import prompts, stories

pytestmark = pytest.mark.nightly
SCHEMAS = 200
LONGEST = 1500  # most tokens of a random answer; longer ones are dropped
END = 2
WORDS = ("a", "name", "city of", "größe", 'in "quotes"', "x-1", "$id", "slash/ed")


def make_schema(draw, depth=3):
    """A random schema with a limited number of levels."""
    kinds = [string, integer, number, choice, nothing]
    if depth:
        kinds += [record, record, array, alternatives, several_types]
    return draw.choice(kinds)(draw, depth)


def string(draw, depth):
    more = draw.choice(
        [
            {"maxLength": 5},
            {"minLength": 2, "maxLength": 4},
            {"pattern": "^[a-c]{1,3}-[0-9]{2}$"},
            {"format": draw.choice(["date", "uuid", "ipv4"])},
        ]
    )
    return {"type": "string", "description": "any text", **more}


def integer(draw, depth):
    least = draw.randint(-300, 300)
    most = least + draw.randint(0, 500)
    bounds = [{"minimum": least, "maximum": most}, {"exclusiveMinimum": least, "maximum": most + 1}]
    return {"type": "integer", **draw.choice(bounds)}


def number(draw, depth):
    return {"type": "number", "minimum": -1.5, "maximum": draw.choice([0, 2.25, 1000])}


def choice(draw, depth):
    some = [*WORDS, 3, -1.5, True, None, {"a": [1]}]
    return draw.choice([{"enum": draw.sample(some, 3)}, {"const": draw.choice(some)}])


def nothing(draw, depth):
    return {"type": draw.choice(["null", "boolean"])}


def record(draw, depth):
    names = draw.sample(WORDS, draw.randint(1, 4))
    properties = {name: make_schema(draw, depth - 1) for name in names}
    required = draw.sample(names, draw.randint(0, len(names)))
    more = draw.choice([False, False, {"type": "integer", "minimum": 0, "maximum": 9}])
    return {
        "type": "object",
        "title": "a record",
        "properties": properties,
        "required": required,
        "additionalProperties": more,
    }


def array(draw, depth):
    least = draw.randint(0, 2)
    items = make_schema(draw, depth - 1)
    if draw.random() < 0.3:
        first = [make_schema(draw, depth - 1) for _ in range(2)]
        return {"type": "array", "prefixItems": first, "items": False, "minItems": 2}
    return {"type": "array", "items": items, "minItems": least, "maxItems": least + 2}


def alternatives(draw, depth):
    if draw.random() < 0.5:  # discriminated by a field, as pydantic writes unions
        kinds = {kind: record(draw, depth) | {"additionalProperties": False} for kind in ("p", "q")}
        for kind, schema in kinds.items():
            schema["properties"] = {"kind": {"const": kind}, **schema["properties"]}
            schema["required"] = ["kind", *schema["required"]]
        return {"oneOf": list(kinds.values())}
    return {"anyOf": [make_schema(draw, depth - 1) for _ in range(2)]}


def several_types(draw, depth):
    return {"type": ["integer", "null"], "minimum": 0, "maximum": 99}


def schema_of(number):
    """The schema with a number; every fifth one refers to its definitions and to itself."""
    draw = random.Random(number)
    if number % 5:
        return make_schema(draw)
    node = record(draw, 1)
    node["properties"]["children"] = {
        "type": "array",
        "items": {"$ref": "#/$defs/node"},
        "maxItems": 1,
    }
    return {"$defs": {"node": node}, "$ref": "#/$defs/node"}


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


def vocabulary():
    """The tokens of the shipped model with its end token, for llguidance."""
    ends = type(stories().generation)(eos_token_ids=(END,))
    return grammar._tokens(dataclasses.replace(stories(), generation=ends))


def test_every_answer_to_every_schema_is_valid():
    tokens = vocabulary()
    judged, kinds = 0, set()
    for number in range(SCHEMAS):
        schema = schema_of(number)
        source = Grammar.json_schema(schema).source
        compiled = llguidance.LLMatcher(tokens, source, log_level=0)
        assert not compiled.is_error(), (schema, compiled.get_error())
        found = [answer(compiled, tokens, seed) for seed in range(3)]
        for text in found:
            if text is not None:
                value = json.loads(text)
                jsonschema.Draft202012Validator(schema).validate(value)
                judged, kinds = judged + 1, kinds | {type(value)}
        assert any(text is not None for text in found), schema
    assert judged > 2.9 * SCHEMAS
    assert kinds == {dict, list, str, int, float, bool, type(None)}


def test_real_answers_are_valid():
    """Sampled from the model at a high temperature."""
    engine = dms_jax.Engine(
        stories(), dms_jax.Vanilla(), num_lanes=4, max_tokens=400, page_size=16, chunk=4
    )
    judged = 0
    for number in range(1, 13):
        schema = schema_of(number)
        sampling = Sampling(
            temperature=1.3, max_new_tokens=300, seed=number, grammar=Grammar.json_schema(schema)
        )
        for each in engine.generate(prompts((5, 9, 4, 7)), sampling=sampling):
            if each.finish_reason == "end":
                jsonschema.Draft202012Validator(schema).validate(json.loads(each.text))
                judged += 1
    assert judged > 30  # of 48; 40 with these seeds
