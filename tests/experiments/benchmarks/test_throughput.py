"""Throughput at the largest batch: what fits, what is measured, what is written."""

import json

import jax.numpy as jnp
import pytest

import dms_jax
from experiments.benchmarks import shapes, throughput
from experiments.benchmarks.throughput import Config


def test_the_largest_batch_fills_the_memory_and_no_more(monkeypatch):
    config = Config(shape="tiny", dtype="float32")
    model = shapes.model_of("tiny", jnp.float32)
    # 2 layers, 2 KV heads, 16 numbers: a page of 64 tokens is 2 * 64 * 16 * 4 = 8,192 bytes, and
    # 100 tokens take 3 pages of each of the 4 rows: 98,304 bytes.
    weights = throughput.tree_bytes(model.transformer)
    monkeypatch.setattr(throughput, "device_bytes", lambda config: weights + 5 * 98_304 + 1)
    assert throughput.largest(config, model, 100) == 5
    assert throughput.largest(Config(most=3), model, 100) == 3
    assert throughput.policy_for(config, 1000, 1) == dms_jax.Vanilla()
    evicting = throughput.policy_for(config, 8192, 8)
    kept = evicting.window + 1 + (1 - evicting.rate) * (8192 - evicting.window - 1)
    assert kept == pytest.approx(1024)


@pytest.mark.nightly
def test_every_part_writes_its_rows(tmp_path):
    out = tmp_path / "throughput.json"
    throughput.main(
        Config(
            shape="tiny",
            contexts=(256,),
            prompts=(128,),
            ratios=(1, 4),
            most=2,
            window=16,
            kcache_context=64,
            kcache_tops=(8,),
            kcache_tokens=96,
            repeats=1,
            dtype="float32",
            out=out,
        )
    )
    rows = json.loads(out.read_text())["rows"]
    assert [row["part"] for row in rows] == ["batch"] * 2 + ["prompt"] * 2 + ["kcache"] * 2
    dense, small = rows[:2]
    assert small["cache_bytes"] < dense["cache_bytes"]
    assert rows[3]["peak_tokens"] < rows[2]["peak_tokens"]
    assert rows[5]["batch"] > rows[4]["batch"]
    assert all(row["tokens_per_second"] > 0 for row in rows if row["part"] != "prompt")
