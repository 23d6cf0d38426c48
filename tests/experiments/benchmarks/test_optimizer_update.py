"""The update of a step alone is timed beside the limit of its size."""

import json

import pytest

import dms_jax
from experiments.benchmarks import optimizer_update as script


@pytest.mark.nightly
def test_an_update_is_timed_beside_its_limit(tmp_path):
    config = script.Config(shapes=("tiny",), rounds=2, out=tmp_path / "update.json")
    (row,) = script.main(config)
    assert len(row["all_ms"]) == 2
    assert row["least_bytes"] == 32 * row["parameters"]
    report = json.loads(config.out.read_text())
    assert report["rows"] == [row]
    limit = 1e-6 * row["least_bytes"] / report["read_gb_a_second"]
    assert row["limit_ms"] == pytest.approx(limit, abs=1e-3)


def test_shapes_are_known(tmp_path):
    with pytest.raises(dms_jax.ConfigError, match=r"--shapes huge: there are .*tiny"):
        script.main(script.Config(shapes=("huge",), out=tmp_path / "update.json"))
