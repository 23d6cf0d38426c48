"""The script of the needle grid: three systems, one picture, and answers that are kept."""

import json

import pytest

from dms_jax import assets
from experiments.reproduction import needle_grid

MODEL = str(assets.path("stories260k"))


@pytest.mark.nightly
def test_three_grids_beside_each_other_which_resume(tmp_path, capsys):
    config = needle_grid.Config(
        model=MODEL,
        compressed=MODEL,
        lengths=(400,),
        depths=(0.0, 100.0),
        problems=1,
        budget=32,
        max_new_tokens=2,
        lanes=2,
        out=tmp_path,
    )
    data = needle_grid.main(config)
    assert list(data["grids"]) == ["vanilla", "StreamingLLM, 32 tokens", "DMS"]
    assert data["grids"]["StreamingLLM, 32 tokens"]["peak"] == [32.0]
    assert json.loads((tmp_path / "needle_grid.json").read_text())["command"]
    assert (tmp_path / "needle_grid.png").stat().st_size > 5000
    before = (tmp_path / "answers-1/answers.jsonl").read_bytes()
    again = needle_grid.main(config)
    assert (tmp_path / "answers-1/answers.jsonl").read_bytes() == before
    for label, grid in data["grids"].items():
        assert {**again["grids"][label], "seconds": 0} == {**grid, "seconds": 0}
    assert "vanilla: 0% found; tokens at the peak: 27" in capsys.readouterr().out
