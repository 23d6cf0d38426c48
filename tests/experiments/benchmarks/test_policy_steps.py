"""Steps under every policy at a length that is set: what is timed, and what cannot be."""

import json

import pytest

import dms_jax
from experiments.benchmarks import policy_steps


@pytest.mark.nightly
@pytest.mark.parametrize(
    "label",
    ["DMS (drawn) + Quest", "H2O", "KCache", "KVpop", "KVzap", "SnapKV", "Vanilla + float8"],
)
def test_speed_is_taken_at_a_length_that_is_set(tmp_path, label):
    config = policy_steps.Config(
        shape="tiny", context=640, batch=1, ratios=(2.0,), only=(label,), out=tmp_path
    )
    (row,) = policy_steps.main(config)
    assert "failed" not in row
    assert row["label"] == label
    live = {"H2O": 321, "KCache": 640, "KVpop": 321, "Vanilla + float8": 640}.get(label, 320)
    assert row["live"] == pytest.approx(live, rel=0.05)
    assert row["step_ms"] > 0
    # The cut comes after the steps that were timed, and takes what an interval had added.
    assert row.get("cut_slots", 80) == pytest.approx(80, abs=1)
    assert ("cut_ms" in row) == (label == "SnapKV")
    data = json.loads((tmp_path / "speed.json").read_text())
    assert data["rows"][0]["cache_bytes"] == row["cache_bytes"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (dict(batch=0), "--batch must"),
        (dict(shape="huge"), "--shape huge: there are .*tiny"),
        (dict(ratios=(2.5,)), "is no whole number"),
        (dict(ratios=(4.0,)), "give --context at least 1,028"),
        (dict(context=256), "leaves 128 tokens at a ratio of 2"),
        (dict(only=("SnapKv",)), "--only SnapKv: .*SnapKV"),
    ],
)
def test_speed_says_what_it_cannot_time(tmp_path, options, said):
    fields = dict(shape="tiny", context=640, batch=1, ratios=(2.0,)) | options
    with pytest.raises(dms_jax.ConfigError, match=said):
        policy_steps.main(policy_steps.Config(out=tmp_path, **fields))


@pytest.mark.nightly
def test_a_cpu_is_not_asked_for_more_than_it_has(tmp_path):
    config = policy_steps.Config(
        shape="tiny", batch=10**7, ratios=(2.0,), only=("TOVA",), out=tmp_path
    )
    (row,) = policy_steps.main(config)
    assert "10000000 sequences" in row["failed"]
    assert "give a smaller" in row["failed"]
