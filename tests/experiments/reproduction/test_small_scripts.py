"""Small scripts: recipes that are tried, answers by batch, few bits; and what becomes of a job."""

import dataclasses
import subprocess
import sys

import numpy as np
import pytest

import dms_jax
from dms_jax import assets
from dms_jax.cache.quantization import KV_DTYPES
from dms_jax.command_line.comparison.texts import packed
from experiments.reproduction import (
    batch_dependence,
    choose_recipe,
    dmc_stories,
    kv_bits,
    processes,
)
from experiments.reproduction.choose_recipe import Trial, distance
from experiments.reproduction.files import write_text

MODEL = str(assets.path("stories260k"))


def test_where_answers_part():
    assert batch_dependence.where([1, 2, 3], [1, 2, 3]) == -1
    assert batch_dependence.where([1, 2, 3], [1, 5, 3]) == 1
    assert batch_dependence.where([1, 2], [1, 2, 3]) == 2


def test_the_share_that_differs_from_one_row_at_a_time():
    x = np.arange(batch_dependence.ROWS, dtype=np.float32)

    def operation(part):
        rows = x[part]
        return rows + (len(rows) > 2) * (rows % 4 == 0)

    assert batch_dependence.shares(operation) == {1: 0, 2: 0, 4: 0.25, 16: 0.25, 64: 0.25}


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
        for length, prompt in ((20, 4), (37, 30), (9, 1))
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


def test_differences_are_paired_by_problem():
    rows = [
        {"trial": name, "per_problem": {"scores": scores}}
        for name, scores in (("better", [1.0, 0.5, 0.75, 0.75]), ("worse", [1.0, 0.25, 0.25, 0.5]))
    ]
    # gaps 0, 0.25, 0.5, 0.25: mean 0.25, deviation sqrt(0.125 / 3), error half of that
    better, worse = choose_recipe.differences(rows)
    assert better == {"worse": pytest.approx([0.25, (0.125 / 3) ** 0.5 / 2])}
    assert worse == {"better": pytest.approx([-0.25, (0.125 / 3) ** 0.5 / 2])}


@pytest.mark.nightly
def test_dmc_is_measured_beside_a_window_that_holds_as_much(tmp_path, monkeypatch):
    real = dmc_stories.recipes.dmc_quickstart

    def short(ratio):
        recipe = real(ratio)
        stages = tuple(dataclasses.replace(stage, steps=1) for stage in recipe.stages)
        return dataclasses.replace(recipe, stages=stages, sequence_length=64)

    tokens = dmc_stories.held_out
    monkeypatch.setattr(dmc_stories, "held_out", lambda model, count: tokens(model, count)[:, :128])
    monkeypatch.setattr(dmc_stories.recipes, "dmc_quickstart", short)
    # A neuron that was not trained to be large says nothing: here some tokens merge.
    monkeypatch.setattr(
        dmc_stories, "POLICY", dataclasses.replace(dmc_stories.POLICY, offset=-1e-4)
    )
    rows = dmc_stories.main(dmc_stories.Config(out=tmp_path, ratios=(3.0,), sequences=2))
    assert [row.method for row in rows] == ["dense", "DMC", "DMC", "StreamingLLM"]
    dense, merged, unmerged, window = rows
    assert dense.peak_tokens == unmerged.peak_tokens == 127
    assert merged.peak_tokens < 115
    assert window.peak_tokens == pytest.approx(max(merged.peak_tokens, 6), abs=0.51)
    assert 1.0 < dense.nats < unmerged.nats


@pytest.mark.nightly
def test_chunks_say_what_decode_steps_say(tmp_path, monkeypatch):
    """`score` feeds the same tokens one by one through the engine."""
    sizes = dict(sequences=2, length=40)
    for name, form in kv_bits.FORMS.items():  # which the script leaves behind
        monkeypatch.setitem(KV_DTYPES, name, form)
    data = kv_bits.main(kv_bits.Config(model="stories260k", chunk=16, out=tmp_path, **sizes))
    rows = {row["cache"]: row for row in data["rows"]}
    model = dms_jax.load(assets.path("stories260k"), dtype="float32")
    text = packed(model, None, **sizes)
    for cache, kv_dtype in (("float32, the model's own", None), ("int4", "int4")):
        scores = dms_jax.generation.score(model, text.sequences, kv_dtype=kv_dtype, page_size=64)
        loss = -np.mean([each.logprobs for each in scores])
        assert abs(rows[cache]["loss"]["mean"] - loss) < 1e-4, cache
        held = scores[0].usage
        # One page of 64 slots in each row.
        assert held.cache_bytes == 64 * rows[cache]["bytes_a_token"]
    assert rows["int4"]["divergence"]["mean"] > rows["float8_e4m3"]["divergence"]["mean"] > 0
    assert rows["int4"]["bytes_a_token"] * 2 == rows["float8_e4m3"]["bytes_a_token"]


def test_errors_of_kv_bits_are_those_of_a_mean_over_sequences():
    # Of equal lengths it is the standard error of the mean of their means: of 1 and 3, 1.
    values = [np.array([1.0, 1.0]), np.array([2.0, 4.0])]
    assert kv_bits.mean(values) == {"mean": 2.0, "error": 1.0}
    alone = kv_bits.mean(values[:1])
    assert (alone["mean"], np.isnan(alone["error"])) == (1.0, True)  # not 0, which nobody measured


def dead(status: int) -> subprocess.Popen:
    process = subprocess.Popen([sys.executable, "-c", f"raise SystemExit({status})"])
    process.wait()
    return process


def test_a_job_that_two_processes_died_of_has_failed(tmp_path):
    """Others would wait for it for ever."""
    for process, again in ((dead(3), True), (dead(4), False)):
        for name, owner in (("data-0", process.pid), ("data-1", process.pid + 1)):
            write_text(tmp_path / "locks" / name, str(owner))
        assert processes.give_back_job_of(process, tmp_path) == ["data-0"]
        assert [lock.name for lock in (tmp_path / "locks").iterdir()] == ["data-1"]
        assert (tmp_path / "failed").exists() is not again
    failure = (tmp_path / "failed" / "data-0.txt").read_text()
    assert all(f"ended with {status}" in failure for status in (3, 4))
