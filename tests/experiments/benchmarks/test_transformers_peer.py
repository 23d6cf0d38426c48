"""A batch of equal requests, and what is said of a peer that does not run."""

import json

import pytest

from experiments.benchmarks import transformers_peer as script


@pytest.mark.nightly
def test_ours_is_timed_where_the_peer_does_not_run(tmp_path, monkeypatch):
    class Nowhere:
        def __init__(self, *args, **options):
            self._processes = {}

        def submit(self, *args):
            raise ImportError("no torch")

        def shutdown(self, **options):
            pass

    monkeypatch.setattr(script.concurrent.futures, "ProcessPoolExecutor", Nowhere)
    config = script.Config(
        shape="tiny",
        batch=2,
        prompt=5,
        new_tokens=4,
        runs=1,
        dtype="float32",
        out=tmp_path / "peer.json",
    )
    script.main(config)
    *peers, ours = json.loads(config.out.read_text())["rows"]
    assert [each["error"] for each in peers] == ["ImportError: no torch"] * 2
    assert ours["tokens_per_second"] == 8 / min(ours["seconds"])
