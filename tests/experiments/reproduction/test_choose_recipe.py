"""Trials of recipes: their stages, the distance from the base model, and a whole tiny one."""

import dataclasses
import json
import re
from typing import ClassVar

import numpy as np
import pytest

import dms_jax
from dms_jax import assets
from experiments.reproduction import choose_recipe
from experiments.reproduction.choose_recipe import TRIALS, Config, Trial, distance
from experiments.reproduction.curve.plan import Config as Plan
from experiments.reproduction.curve.plan import Paths
from experiments.reproduction.files import write_json

MODEL = str(assets.path("stories260k"))
LENGTHS = (20, 37, 9)
PROMPTS = (4, 30, 1)


@pytest.fixture
def written(tmp_path):
    """A run directory with two shards of the same three documents."""
    tokens = np.random.default_rng(0).integers(3, 500, sum(LENGTHS), dtype=np.uint16)
    for shard in range(2):
        path = Paths(Plan(out=tmp_path)).data(shard)
        path.parent.mkdir(exist_ok=True)
        lengths, prompts = (np.asarray(x, np.int32) for x in (LENGTHS, PROMPTS))
        np.savez(path, tokens=tokens, lengths=lengths, prompts=prompts)
    return tmp_path


def test_a_trial_goes_up_to_the_ratio():
    ramp = Trial(1e-4, 1e-3, steps_per_ratio=50, final_learning_rate=1e-6).stage(4.0)
    assert (ramp.kind, ramp.steps, ramp.compression_ratio) == ("ramp", 150, 4.0)
    assert (ramp.learning_rate, ramp.adapter_learning_rate) == (1e-4, 1e-3)
    assert ramp.final_learning_rate == 1e-6
    control = Trial(1e-4, steps_per_ratio=50).stage(4.0)
    assert (control.kind, control.steps, control.compression_ratio) == ("train", 150, 1)


@pytest.mark.nightly
def test_distance_is_the_divergence_a_token_of_the_completions():
    model = dms_jax.load(MODEL)
    policy = dms_jax.StreamingLLM(budget=6, sinks=2)
    rng = np.random.default_rng(1)
    documents = [
        (rng.integers(3, 500, length).astype(np.int32), prompt)
        for length, prompt in zip(LENGTHS, PROMPTS, strict=True)
    ]
    total = count = 0.0
    for tokens, prompt in documents:
        before, after = (
            np.asarray(model.logits(tokens[None], policy=each), np.float64)[0]
            for each in (dms_jax.Vanilla(), policy)
        )
        before, after = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (before, after))
        each = (np.exp(before) * (before - after)).sum(-1)
        total += each[prompt - 1 : -1].sum()
        count += len(tokens) - prompt
    found = distance(model, model, policy, documents)
    assert total / count > 0.01
    assert found == pytest.approx(total / count, rel=1e-4)
    assert distance(model, model, dms_jax.Vanilla(), documents) == 0


def test_what_cannot_be_tried_is_refused(written, tmp_path):
    with pytest.raises(dms_jax.ConfigError, match="no trial 'sgd'; there are adapter-600, "):
        Config(out=written, trials=("sgd",))
    with pytest.raises(dms_jax.ConfigError, match=r"no documents of shard 2.*--only data --out"):
        choose_recipe.main(Config(out=written, shards=3))
    with pytest.raises(dms_jax.ConfigError, match="at least two"):
        Config(out=written, shards=1)
    with pytest.raises(dms_jax.ConfigError, match="processes must be >= 1, got 0"):
        Config(out=written, shards=2, processes=0)
    with pytest.raises(dms_jax.ConfigError, match="ratio must be above 1"):
        Config(out=written, shards=2, ratio=1.0)
    with pytest.raises(dms_jax.ConfigError, match="batch_size must be >= 1"):
        Config(out=written, shards=2, batch_size=0)


def test_what_fails_in_a_process_is_told_in_a_line(written, capsys):
    config = Config(out=written, shards=2, model=str(written / "nowhere"), trials=("base",))
    with pytest.raises(SystemExit) as ended:
        choose_recipe.entry(config)
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert re.match(r"CheckpointError: there is no directory or file .*nowhere", told)


def test_differences_are_paired_by_problem():
    rows = [
        {"trial": name, "per_problem": {"scores": scores}}
        for name, scores in (("better", [1.0, 0.5, 0.75, 0.75]), ("worse", [1.0, 0.25, 0.25, 0.5]))
    ]
    # gaps 0, 0.25, 0.5, 0.25: mean 0.25, deviation sqrt(0.125 / 3), error half of that
    better, worse = choose_recipe.differences(rows)
    assert better == {"worse": pytest.approx([0.25, (0.125 / 3) ** 0.5 / 2])}
    assert worse == {"better": pytest.approx([-0.25, (0.125 / 3) ** 0.5 / 2])}


class FakeProcess:
    """A process that ends at once; `given` collects the programs."""

    given: ClassVar[list[str]] = []

    def __init__(self, command, **_):
        self.given.append(command[-1])

    def wait(self):
        return 0

    poll = wait


def test_the_base_model_is_measured_once_and_what_is_there_not_again(written, monkeypatch):
    monkeypatch.setattr(FakeProcess, "given", [])
    monkeypatch.setattr(choose_recipe.subprocess, "Popen", FakeProcess)
    monkeypatch.setattr(choose_recipe, "visible_gpus", list)
    row = {"trial": "control", "accuracy": [0.5, 0.1], "peak": 1, "kl": 0, "kl_dense": 0}
    row |= {"steps": 1, "seconds": 1, "per_problem": {"scores": [1, 0]}}
    write_json(written / "recipes" / "control.json", row)
    trials = ("adapter", "control", "adapter-100")
    choose_recipe.main(Config(out=written, shards=2, processes=2, trials=trials))
    own = [re.search(r"trials=\((.*?),?\)", program)[1] for program in FakeProcess.given]
    assert own == ["'base', 'adapter-100'", "'adapter'"]


@pytest.mark.nightly
def test_a_trial_is_trained_measured_and_not_repeated(written, capsys):
    config = Config(
        out=written,
        model=MODEL,
        trials=("adapter",),
        ratio=1.01,
        shards=2,
        batch_size=1,
        sequence_length=64,
        task="needle",
        problems=2,
        chains=1,
        max_new_tokens=4,
        needle_size=10,
    )
    choose_recipe.work(dataclasses.replace(config, trials=("base", "adapter")))
    rows = choose_recipe.main(config)  # nothing is left to do
    assert {row["trial"] for row in rows} == {"adapter", "base"}
    printed = capsys.readouterr().out
    summary = json.loads((written / "recipes.json").read_text())
    for row, kept in zip(rows, summary["trials"], strict=True):
        assert row.pop("per_problem")["scores"]
        assert set(kept.pop("above")) == {"base", "adapter"} - {row["trial"]}
        assert row == kept
        assert f"{row['peak']:7.0f}{row['kl']:10.5f}" in printed
    base, adapter = sorted(rows, key=lambda row: row["steps"])
    assert (base["steps"], base["kl"], base["kl_dense"]) == (0, 0, 0)
    assert (adapter["steps"], adapter["settings"]) == (3, vars(TRIALS["adapter"]))
    assert adapter["kl_dense"] > 0
