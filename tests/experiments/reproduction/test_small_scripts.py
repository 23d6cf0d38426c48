"""Small scripts: answers by batch, few bits, DMC beside a window."""

import dataclasses
import math

import numpy as np
import pytest

import dms_jax
from dms_jax import assets
from dms_jax.cache.quantization import KV_DTYPES
from experiments.reproduction import batch_dependence, dmc_stories, kv_bits
from experiments.reproduction.files import error_text
from experiments.reproduction.texts import packed


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


def test_an_error_that_is_unknown_is_said_to_be():
    assert error_text(0.0213, ".2f") == "± 0.02"
    assert error_text(math.nan, ".2f") == error_text(None, ".2f") == "± unknown"
