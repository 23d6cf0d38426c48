"""The benchmark of training steps: what is timed, what is left out, what is written."""

import json

import pytest

import dms_jax
from experiments.benchmarks import training as script


@pytest.mark.nightly
def test_cases_are_timed_and_written(tmp_path, monkeypatch):
    monkeypatch.setitem(script.CASES, "too many", script.Case("tiny", data=1024))
    config = script.Config(
        cases=("tiny+products+chunk", "tiny-fsdp2", "too many"),
        steps=1,
        out=tmp_path / "training.json",
    )
    one, two, left_out = script.main(config)
    for row in (one, two):
        assert row["tokens_per_second"] > 0
        assert row["metrics"]["skipped"] == 0
        assert row["planned_bytes"] > 0
    assert (one["remat"], one["chunk"]) == ("all_but_products", 2**29)
    assert left_out["left_out"] == "too few devices"
    assert json.loads(config.out.read_text())["rows"] == [one, two, left_out]


def test_families_of_kernels(monkeypatch):
    events = [
        (0.0, 900.0, "ncclDevKernel_AllGather_RING_LL"),
        (1.0, 2000.0, "nvjet_tst_128x256"),
        (2.0, 500.0, "retrofit_forward"),
        (3.0, 3000.0, "nvjet_tst_128x256"),
    ]
    monkeypatch.setattr(script, "device_events", lambda run: events)
    found = script.kernels_of(None)
    assert found["families"]["products"] == {"ms": 5.0, "launches": 2}
    assert found["families"]["attention"] == {"ms": 0.5, "launches": 1}
    assert next(iter(found["longest_ms"])) == "nvjet_tst_128x256"


def test_an_unknown_case_is_named(tmp_path):
    with pytest.raises(dms_jax.ConfigError, match="no case '2b'"):
        script.main(script.Config(cases=("2b",), out=tmp_path / "training.json"))
    with pytest.raises(dms_jax.ConfigError, match="no setting 'more'"):
        script.main(script.Config(cases=("1b+more",), out=tmp_path / "training.json"))
