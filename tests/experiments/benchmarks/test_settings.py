"""What scripts about steps cannot measure is refused before a model is made."""

import pytest

import dms_jax
from experiments.benchmarks import decode_steps, step_launches, step_options, throughput

SCRIPTS = (decode_steps, step_launches, throughput)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__.rsplit(".", 1)[-1])
def test_every_size_is_at_least_one(script):
    script.Config()
    with pytest.raises(dms_jax.ConfigError, match="repeats must be positive, got 0"):
        script.Config(repeats=0)


def test_one_number_of_several_counts_too():
    with pytest.raises(dms_jax.ConfigError, match=r"ratios must be positive, got \(4, 0\)"):
        decode_steps.Config(ratios=(4, 0))
    with pytest.raises(dms_jax.ConfigError, match="ratios: give at least one"):
        throughput.Config(ratios=())
    with pytest.raises(dms_jax.ConfigError, match="window must not be negative"):
        decode_steps.Config(window=-1)
    assert decode_steps.Config(window=0, ratios=(1,)).window == 0


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
