"""Errors of the library name options of the command, and nothing else of a message changes."""

import dataclasses
from typing import Annotated

import pytest
import tyro

import dms_jax
from dms_jax.checks import Count, check
from dms_jax.command_line import demo, evaluate, generate, retrofit
from dms_jax.command_line.self_taught.settings import SelfTaught
from dms_jax.command_line.spelling import options_of, spelled, spelled_as_options
from dms_jax.evaluation.journal import Journal
from dms_jax.generation.requests import NotNumbersError


def test_arguments_in_backquotes_become_options():
    text = (
        "another policy (`window` 8, not 9), recipe (`batch_size` 4, not 2). Give "
        "`restart_from=6`, `remat='auto'`, or another `out`; `hidden_size` stays."
    )
    with pytest.raises(dms_jax.ConfigError) as caught, spelled_as_options(retrofit.Config):
        raise dms_jax.ConfigError(text)
    assert str(caught.value) == (
        "another policy (--options window=8, not 9), recipe (--batch-size 4, not 2). Give "
        "--restart-from 6, --remat auto, or another --out; `hidden_size` stays."
    )


def test_error_keeps_its_class_and_attributes():
    error = NotNumbersError("Logits are NaN; give `dtype=float32`.", indices=[3])
    error.finished = {0: "done"}
    with pytest.raises(NotNumbersError) as caught, spelled_as_options(generate.Config):
        raise error
    assert str(caught.value) == "Logits are NaN; give --dtype float32."
    assert (caught.value.indices, caught.value.finished) == (error.indices, error.finished)


def test_absent_setting_differs_from_null(tmp_path):
    Journal(tmp_path, {"tasks": [{"name": "gsm8k"}]}).close()
    with pytest.raises(dms_jax.DataError, match="answers of other settings: `tasks`"):
        Journal(tmp_path, {"tasks": [{"name": "gsm8k", "split": None}]})


def test_resume_error_names_the_option_that_differs(tmp_path):
    first = dict(sampling={"max_new_tokens": 2}, policy={"temperature": 1}, chat=None)
    Journal(tmp_path, first).close()
    other = dict(sampling={"max_new_tokens": 3}, policy={"temperature": 2}, chat={"system": None})
    with pytest.raises(dms_jax.DataError) as caught, spelled_as_options(evaluate.Config):
        Journal(tmp_path, other)
    assert str(caught.value) == (
        f"{tmp_path / 'answers.jsonl'} holds answers of other settings: --chat, policy (--options "
        "temperature=1, not 2), sampling (--max-new-tokens 2, not 3). Give the same to resume "
        "after them, or name another folder."
    )


@pytest.mark.parametrize(
    "text",
    [
        "parts/seed=3/a.txt cannot be read: No such file or directory",
        "steps=3/tokens=9.jsonl, line 2: there is no field 'text'; fields: seed=, out=",
        "Sampling: top_p must be above 0",  # of an error that carries no argument
    ],
)
def test_paths_and_texts_stay(text):
    other = dms_jax.DataError(text)
    with pytest.raises(dms_jax.DataError) as same, spelled_as_options(retrofit.Config):
        raise other
    assert same.value is other


def refusal(make):
    with pytest.raises(dms_jax.ConfigError) as caught:
        make()
    return caught.value


@pytest.mark.parametrize(
    ("make", "settings", "told"),
    [
        (lambda: dms_jax.Sampling(top_p=2.0), generate.Config, "--top-p must be a finite number"),
        (lambda: dms_jax.Sampling(max_new_tokens=0), evaluate.Config, "--max-new-tokens must be a"),
        (lambda: dms_jax.recipes.dms_paper(0.5), retrofit.Config, "--compression-ratio must be "),
        (lambda: dms_jax.Sampling(temperature=-1), demo.Config, "--solve.temperature must be"),
        # Of two parts of the demo, and of what has no such option.
        (lambda: dms_jax.Sampling(seed=-1), demo.Config, "seed must be a whole number"),
        (lambda: dms_jax.Sampling(top_k=-5), evaluate.Config, "Sampling: top_k must be"),
        (lambda: dms_jax.TOVA(budget=0), generate.Config, "TOVA: budget must be a whole number of"),
        (lambda: dms_jax.DMC(temperature=-1), evaluate.Config, "DMC: temperature must be"),
        (lambda: check("--lanes", 0, Count | None), evaluate.Config, "--lanes must be a whole n"),
    ],
)
def test_error_starts_with_the_option(make, settings, told):
    assert spelled(refusal(make), options_of(settings)).startswith(told)


def test_nobody_types_none():
    error = refusal(lambda: check("batch_size", "None or 1", Count | None))
    assert spelled(error, options_of(SelfTaught)) == (
        "--batch-size must be a whole number of at least 1, got 'None or 1'."
    )


def test_options_have_the_names_of_fields():
    @dataclasses.dataclass
    class Inner:
        seed: int = 0

    @dataclasses.dataclass
    class Settings:
        words: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
        top_p: float = 1.0
        first: Inner = dataclasses.field(default_factory=Inner)

    assert options_of(Settings) == {"top_p": "--top-p", "seed": "--first.seed"}
