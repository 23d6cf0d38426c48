"""The comparison of policies: who takes part, what is measured, what is written."""

import dataclasses
import json
import pathlib
import sys

import numpy as np
import pytest

import dms_jax
from dms_jax import assets
from dms_jax.data import Documents
from dms_jax.policies import POLICIES

EXPERIMENTS = pathlib.Path(__file__).resolve().parents[2] / "experiments"


@pytest.fixture(scope="module")
def scripts():
    """The script and its parts, which find each other as when they are run."""
    sys.path.insert(0, str(EXPERIMENTS))
    try:
        import compare_policies
        from comparison import speed, systems

        yield compare_policies, systems, speed
    finally:
        sys.path.remove(str(EXPERIMENTS))


@pytest.fixture(scope="module")
def stories():
    return dms_jax.load(assets.path("stories260k"))


def test_rows_are_measured_written_and_shown(scripts, tmp_path, capsys):
    compare, _, _ = scripts
    config = compare.Config(
        ratios=(4.0,),
        sequences=2,
        length=40,
        learn=(),
        only=("StreamingLLM", "KCache", "float8"),
        out=tmp_path,
    )
    rows = {row.label: row for row in compare.main(config)}
    assert set(rows) == {"dense", "float8", "StreamingLLM", "KCache"}
    dense, streaming = rows["dense"], rows["StreamingLLM"]
    assert (dense.increase, dense.peak, dense.reads) == (0, 39, 39 * 40 / 2)
    assert streaming.peak == streaming.live == 10
    assert streaming.reads == 55 + 29 * 10
    assert streaming.nats == pytest.approx(dense.nats + streaming.increase)
    assert rows["float8"].bytes < dense.bytes / 2
    # Two of five layers keep their values on the device; the others' are half of their bytes.
    assert rows["KCache"].bytes + rows["KCache"].host_bytes == dense.bytes
    assert rows["KCache"].host_bytes == dense.bytes * 3 // 10
    data = json.loads((tmp_path / "quality.json").read_text())
    assert [row["label"] for row in data["rows"]] == list(rows)
    assert data["tokens"] == 2 * 39
    assert data["config"]["length"] == "40"
    assert (tmp_path / "quality.png").stat().st_size > 10_000
    assert "StreamingLLM at 4" in capsys.readouterr().out
    again = dataclasses.replace(config, only=("TOVA",), merge=True)
    merged = compare.main(again)
    assert [row.label for row in merged] == [*rows, "TOVA"]
    assert len(json.loads((tmp_path / "quality.json").read_text())["rows"]) == 5
    with pytest.raises(SystemExit, match="tokens"):
        compare.main(dataclasses.replace(again, sequences=1))


def test_every_system_takes_part_with_the_same_budget(scripts, stories):
    _, systems, _ = scripts
    free = {one.label: one.policy for one in systems.training_free(stories, 4.0, 512)}
    learned = {name for name, kind in POLICIES.items() if kind.learned}
    assert set(free) | learned | {"Vanilla"} == set(POLICIES)
    for name, policy in free.items():
        budget = getattr(policy, "budget", getattr(getattr(policy, "scorer", None), "budget", 128))
        assert budget == 128, name
    dms = systems.System("DMS", 4.0, stories, dms_jax.DMS(window=8))
    more = {one.label: one for one in systems.combined(dms, 512)}
    assert more["DMS + Quest"].policy.over == more["DMS + KCache"].policy.over == dms.policy
    assert more["DMS + float8"].kv_dtype == "float8_e4m3"


@pytest.mark.slow
def test_learned_systems_come_out_of_the_same_tokens(scripts, stories):
    _, systems, _ = scripts
    lessons = systems.Lessons(
        Documents(assets.stories("train")[:40]), steps=8, batch_size=2, sequence_length=32
    )
    told = []
    policy = dms_jax.DMS(window=4, source="adapter")
    ones = list(systems.sparsified(stories, policy, (2.0, 4.0), lessons, told.append))
    assert [(one.ratio, one.policy) for one in ones] == [(2.0, policy), (4.0, policy)]
    (half,) = systems.grouped(stories, 2.0, lessons, told.append)
    assert half.model.config.num_kv_heads == stories.config.num_kv_heads // 2
    assert list(systems.grouped(stories, 3.0, lessons, told.append)) == []
    assert len(told) == 2
    assert all(f"{8 * 2 * 32:,}" in line for line in told)
    # Uptraining moved the weights.
    before = dms_jax.to_grouped_query(stories, stories.config.num_kv_heads // 2)
    kernels = [m.transformer.layers.attention.qkv_proj.kernel[...] for m in (before, half.model)]
    assert np.abs(np.asarray(kernels[0]) - np.asarray(kernels[1])).max() > 1e-5


@pytest.mark.parametrize("label", ["DMS (drawn) + Quest", "H2O", "KCache"])
def test_speed_is_taken_at_a_length_that_is_set(scripts, tmp_path, label):
    compare, _, _ = scripts
    config = compare.Config(
        speed=True, shape="tiny", context=640, batch=1, ratios=(2.0,), only=(label,), out=tmp_path
    )
    (row,) = compare.main(config)
    assert "failed" not in row
    assert row["label"] == label
    assert row["live"] == pytest.approx({"H2O": 321, "KCache": 640}.get(label, 320), rel=0.05)
    assert row["step_ms"] > 0
    data = json.loads((tmp_path / "speed.json").read_text())
    assert data["rows"][0]["cache_bytes"] == row["cache_bytes"]
