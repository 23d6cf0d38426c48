"""The options of an engine: one set for everything that generates, checked in one place."""

import dataclasses
import inspect
import typing

import pytest

import dms_jax
from dms_jax.generation import EngineKeywords, EngineOptions
from dms_jax.generation.engine import Engine
from tests.generation.support import model_for

SHORT = dms_jax.Sampling(max_new_tokens=1)


def test_keyword_types_match_option_fields():
    fields = typing.get_type_hints(EngineOptions)
    names = typing.get_type_hints(EngineKeywords)
    assert names
    assert names.items() <= fields.items()
    defaults = {field.name: field.default for field in dataclasses.fields(EngineOptions)}
    assert all(defaults[name] is not dataclasses.MISSING for name in names)


@pytest.mark.parametrize(
    "call",
    [Engine, dms_jax.generate, dms_jax.score],
    ids=lambda f: f.__name__,
)
def test_help_shows_the_options_with_their_defaults(call):
    shown = inspect.signature(call).parameters
    defaults = {field.name: field.default for field in dataclasses.fields(EngineOptions)}
    for name, kind in typing.get_type_hints(EngineKeywords).items():
        assert shown[name].default == defaults[name]
        assert shown[name].annotation == kind
    assert "options" not in shown


def test_engine_keeps_its_options():
    engine = Engine(model_for("vanilla"), num_lanes=2, max_tokens=16, page_size=4, chunk=4)
    assert engine.options == EngineOptions(2, 16, None, 4, page_size=4)
    assert engine.runner.page_size == 4


@pytest.mark.parametrize(
    "call",
    [
        lambda model, **options: Engine(model, **options),
        lambda model, **options: dms_jax.generate(model, [[1]], sampling=SHORT, **options),
        lambda model, **options: dms_jax.score(model, [[1, 2]], **options),
    ],
    ids=["Engine", "generate", "score"],
)
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"pagesize": 4}, r"no option pagesize \(did you mean page_size\?\)"),
        ({"prefill_chunk": 0}, "prefill_chunk must be a whole number of at least 1"),
        (
            {"memory": -1},
            "memory must be a finite number above 0 or None, got -1; give bytes",
        ),
        ({"kv_dtype": "int8"}, "kv_dtype must be"),
    ],
)
def test_invalid_option_is_named(call, options, says):
    with pytest.raises(dms_jax.ConfigError, match=says):
        call(model_for("vanilla"), **options)
