"""The DMC experiment with hardly any training: its rows, and what they are measured from."""

import dataclasses
import json

import pytest

from experiments.reproduction import dmc_stories as script


@pytest.mark.nightly
def test_it_measures_what_it_prints(tmp_path, capsys, monkeypatch):
    real = script.recipes.dmc_quickstart

    def short(ratio):
        recipe = real(ratio)
        stages = tuple(dataclasses.replace(stage, steps=1) for stage in recipe.stages)
        return dataclasses.replace(recipe, stages=stages, sequence_length=64)

    tokens = script.held_out
    monkeypatch.setattr(script, "held_out", lambda model, count: tokens(model, count)[:, :128])
    monkeypatch.setattr(script.recipes, "dmc_quickstart", short)
    # A neuron that was not trained to be large says nothing: here some tokens merge.
    monkeypatch.setattr(script, "POLICY", dataclasses.replace(script.POLICY, offset=-1e-4))
    rows = script.main(script.Config(out=tmp_path, ratios=(3.0,), sequences=2))
    assert [row.method for row in rows] == ["dense", "DMC", "DMC", "StreamingLLM"]
    dense, merged, unmerged, window = rows
    assert dense.peak_tokens == unmerged.peak_tokens == 127
    assert merged.peak_tokens < 115
    assert window.peak_tokens == pytest.approx(max(merged.peak_tokens, 6), abs=0.51)
    assert 1.0 < dense.nats < unmerged.nats
    results = json.loads((tmp_path / "results.json").read_text())
    assert [row["label"] for row in results["rows"]] == [row.label for row in rows]
    printed = capsys.readouterr().out
    assert all(f"{row.nats:.4f}" in printed for row in rows)
    assert (tmp_path / "ratio-3" / "model" / "config.json").exists()
