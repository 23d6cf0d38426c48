"""Times of first tokens: which prompts are served, and what is written."""

import json

import pytest

import dms_jax
from dms_jax.generation import Engine
from experiments.benchmarks import shared_prompts as script


@pytest.mark.nightly
def test_three_kinds_of_calls_are_timed(monkeypatch, tmp_path):
    served, generate = [], Engine.generate

    def counted(self, prompts, **options):
        completions = generate(self, prompts, **options)
        served.append(sum(each.usage.prefilled_tokens for each in completions))
        return completions

    monkeypatch.setattr(Engine, "generate", counted)
    out = tmp_path / "shared.json"
    config = script.Config(
        shape="tiny",
        layers=1,
        prompt=24,
        chains=3,
        policies=("Vanilla",),
        repeats=2,
        dtype="float32",
        out=out,
    )
    script.main(config)
    assert served == 3 * [24, 24, 72]
    (row,) = json.loads(out.read_text())["rows"]
    assert {kind: len(times) for kind, times in row["all_seconds"].items()} == {
        "one chain": 2,
        "chains of one prompt": 2,
        "different prompts": 2,
    }
    seconds = row["seconds"]
    assert row["chains_over_one"] == seconds["chains of one prompt"] / seconds["one chain"]


@pytest.mark.parametrize("name", ["layers", "prompt", "chains", "new_tokens", "repeats"])
def test_every_size_is_at_least_one(name):
    option = f"--{name.replace('_', '-')}"
    with pytest.raises(dms_jax.ConfigError, match=f"{option} must be positive, got 0"):
        script.Config(**{name: 0})
