"""The pauses for exports are timed and written."""

import json

import pytest

from experiments.benchmarks import export_pause as script


@pytest.mark.nightly
def test_every_export_is_timed(tmp_path):
    config = script.Config(shape="tiny", trainable=("adapter",), out=tmp_path / "pause.json")
    (row,) = script.main(config)
    assert len(row["pause_seconds"]) == len(row["save_seconds"]) == len(script.RATIOS)
    assert all(seconds > 0 for seconds in row["pause_seconds"] + row["save_seconds"])
    assert json.loads(config.out.read_text())["rows"] == [row]
    assert [path.name for path in tmp_path.iterdir()] == ["pause.json"]
