"""What scripts about steps cannot measure is refused before a model is made."""

import dataclasses
import importlib
import math
import pathlib

import pytest

import dms_jax
from experiments import benchmarks
from experiments.benchmarks import decode_steps, step_options, throughput, transformers_peer

ROOT = pathlib.Path(benchmarks.__file__).parent
SCRIPTS = [
    name
    for name in sorted(path.stem for path in ROOT.glob("*.py"))
    if "class Config" in (ROOT / f"{name}.py").read_text(encoding="utf-8")
]
# Options that may be 0.
ZERO = {"window", "seed", "long", "temperature"}


def numbers(config) -> list[dataclasses.Field]:
    """The settings that are numbers, or several of them."""

    def is_number(value) -> bool:
        return type(value) in (int, float)

    fields = dataclasses.fields(config)
    several = [x for x in fields if isinstance(x.default, tuple) and x.default]
    return [x for x in fields if is_number(x.default)] + [
        x for x in several if all(map(is_number, x.default))
    ]


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_number_of_every_script_is_checked_before_anything_is_made(script):
    config = importlib.import_module(f"experiments.benchmarks.{script}").Config
    config()
    for field in numbers(config):
        for wrong in (-1, math.nan, *(() if field.name in ZERO else (0,))):
            value = (*field.default[:-1], wrong) if type(field.default) is tuple else wrong
            with pytest.raises(dms_jax.ConfigError, match=field.name.replace("_", ".")):
                config(**{field.name: value})


def test_scripts_with_numbers_are_found():
    assert len(SCRIPTS) > 20
    peer = transformers_peer.Config
    assert {field.name for field in numbers(peer)} == {
        *("batch", "prompt", "new_tokens", "temperature", "runs", "most_seconds")
    }
    with pytest.raises(dms_jax.ConfigError, match="--batch must be positive, got 0"):
        peer(batch=0)
    with pytest.raises(dms_jax.ConfigError, match="--temperature must be positive, got 0"):
        peer(temperature=0.0)  # logits are divided by it


def test_one_number_of_several_counts_too():
    with pytest.raises(dms_jax.ConfigError, match=r"ratios must be positive, got \(4, 0\)"):
        decode_steps.Config(ratios=(4, 0))
    with pytest.raises(dms_jax.ConfigError, match="ratios: give at least one"):
        throughput.Config(ratios=())
    with pytest.raises(dms_jax.ConfigError, match="window must not be negative"):
        decode_steps.Config(window=-1)
    assert decode_steps.Config(window=0, ratios=(1,)).window == 0
    with pytest.raises(dms_jax.ConfigError, match="--temperature must be finite, got inf"):
        transformers_peer.Config(temperature=math.inf)  # it is positive


def test_a_ratio_leaves_what_the_window_keeps():
    assert decode_steps.Config(context=1032, ratios=(1, 8)).context == 1032
    says = "A ratio of 8 leaves 128.875 of 1031 tokens, and a window of 128 keeps 129"
    with pytest.raises(dms_jax.ConfigError, match=says):
        decode_steps.Config(context=1031, ratios=(1, 8))
    with pytest.raises(dms_jax.ConfigError, match="A ratio of 8 leaves"):
        throughput.Config(contexts=(8192, 1031))
    assert throughput.Config(contexts=(1031,), parts=("kcache",)).contexts == (1031,)


@pytest.mark.parametrize("memory", [0.0, 1.5, float("nan")])
def test_no_more_memory_than_there_is(memory):
    with pytest.raises(dms_jax.ConfigError, match=r"memory must be .* above 0 and at most 1"):
        throughput.Config(memory=memory)


def test_a_script_checks_its_own_ratios_not_those_of_another(monkeypatch):
    """Both hand their settings to `decode_steps`, whose defaults are not theirs."""
    reached = RuntimeError("the model is next")

    def model_of(*_):
        raise reached

    monkeypatch.setattr(step_options.shapes, "model_of", model_of)
    monkeypatch.setattr(step_options, "make_place", lambda *_: None)
    small = dict(context=200, window=64)
    with pytest.raises(RuntimeError, match="the model is next"):
        step_options.main(step_options.Config(ratios=(2,), **small))
    with pytest.raises(dms_jax.ConfigError, match="A ratio of 8 leaves"):
        step_options.main(step_options.Config(ratios=(8,), **small))
