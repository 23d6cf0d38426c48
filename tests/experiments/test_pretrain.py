"""The pretraining script: a small run and its files."""

import json

import chex
import jax
import numpy as np
import pytest

import dms_jax
from experiments import pretrain


@pytest.mark.nightly
def test_small_run_writes_its_files(tmp_path, monkeypatch):
    def fewer(read, count):
        return lambda split: [text[:50_000] for text in read(split)[:count]]

    # Nine megabytes of prose take long to encode, and five small steps read almost nothing.
    monkeypatch.setattr(dms_jax.assets, "stories", fewer(dms_jax.assets.stories, 300))
    monkeypatch.setattr(dms_jax.assets, "books", fewer(dms_jax.assets.books, 2))
    config = pretrain.Config(
        out=tmp_path / "run",
        steps=5,
        hidden_size=16,
        intermediate_size=32,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        sequence_length=256,
        batch_size=2,
        held_out=2,
        evaluate_every=3,
        workers=0,
    )
    pretrain.main(config)
    result = json.loads((config.out / "summary.json").read_text())["result"]
    assert (result["steps"], result["tokens"]) == (5, 5 * 2 * 256)
    parts = {"linear", "arithmetic", "words", "needle", "tracking", "stories", "text"}
    assert result["held_out_loss"].keys() == parts
    assert all(0 < loss < 10 for loss in result["held_out_loss"].values())
    assert len((config.out / "log.jsonl").read_text().splitlines()) == 5
    assert (config.out / "curves.png").stat().st_size > 5000

    wide, narrow = (dms_jax.load(config.out / name) for name in ("model", "bfloat16"))
    assert (wide.dtype, narrow.dtype) == ("float32", "bfloat16")
    assert narrow.policy == dms_jax.Vanilla()
    assert narrow.generation.eos_token_ids == (narrow.tokenizer.eos_token_id,)
    tokens = np.arange(12)[None]
    chex.assert_trees_all_close(wide.logits(tokens), narrow.logits(tokens), rtol=1e-7, atol=0.05)


def test_skipped_step_is_left_out_of_the_training_loss():
    times = dict(tokens=8, seconds=1.0, data_seconds=0.1, tokens_per_second=8.0)
    records = [
        dict(times, skipped=loss is None, lm_loss=loss, evaluation={"tasks": None})
        for loss in (4.0, None, 2.0)
    ]
    model = dms_jax.load(dms_jax.assets.path("stories260k"))
    found = pretrain.summarise(model, records)
    assert (found["training_loss"], found["steps"]) == (3.0, 3)
    assert found["parameters"] == sum(x.size for x in jax.tree.leaves(model.transformer))
