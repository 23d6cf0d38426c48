"""The figure of the cache's share of a step."""

import json

import pytest

from experiments.reproduction import latency


@pytest.mark.nightly
def test_a_figure_with_its_numbers_beside_measured_steps(tmp_path, capsys):
    data = latency.main(latency.Config(out=tmp_path))
    assert (tmp_path / "latency.png").stat().st_size > 10_000
    assert json.loads((tmp_path / "latency.json").read_text()) == json.loads(json.dumps(data))
    rows = {
        (row["model"], row["device"], row["batch"], row["compression_ratio"], row["tokens"]): row
        for row in data["share_of_the_cache"]
    }
    assert len(rows) == 6 * 5 * 3 * 3 * 2
    plain, eighth = (rows["Llama 3.1 8B", "H100", 256, ratio, 8192] for ratio in (1, 8))
    assert plain["share"] > 0.9 > eighth["share"]
    assert not rows["Llama 3.1 8B", "TPU v5e", 1, 1, 8192]["fits"]  # 16 GB of weights
    assert rows["Llama 3.1 8B", "H200", 16, 1, 8192]["fits"]
    assert len(data["measured"]) == 9
    assert all(0.3 < row["modelled_ms"] / row["measured_ms"] < 1 for row in data["measured"])
    assert "Llama 3.1 8B, plain cache: 12.90 ms measured" in capsys.readouterr().out
