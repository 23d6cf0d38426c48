"""The options of a training run: one set for `train` and `retrofit`, checked in one place."""

import dataclasses
import inspect
import typing

import pytest

import dms_jax
from dms_jax.training import RunKeywords, RunOptions
from tests.training.tiny import EAGER, documents, language_model, recipe


def test_keywords_equal_the_fields_of_the_options():
    assert typing.get_type_hints(RunKeywords) == typing.get_type_hints(RunOptions)


@pytest.mark.parametrize("call", [dms_jax.train, dms_jax.retrofit], ids=["train", "retrofit"])
def test_help_shows_the_options_with_their_defaults(call):
    shown = inspect.signature(call).parameters
    for field in dataclasses.fields(RunOptions):
        assert shown[field.name].default == field.default
    assert "options" not in shown


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"checkpoint_evry": 5}, r"no option checkpoint_evry \(did you mean checkpoint_every\?\)"),
        ({"evaluate_every": 0}, "evaluate_every must be a whole number of at least 1, got 0"),
        ({"seed": -1}, "seed must be a whole number of at least 0, got -1"),
        ({"stop_after": 0}, "stop_after must be a finite number above 0"),
    ],
)
def test_a_wrong_option_is_named(options, says):
    with pytest.raises(dms_jax.ConfigError, match=says):
        dms_jax.retrofit(language_model(), EAGER, recipe=recipe(), data=documents(), **options)
