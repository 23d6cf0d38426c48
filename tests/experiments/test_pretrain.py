"""The pretraining script: a small run and its files, its plan, and the held-out data."""

import dataclasses
import itertools
import json

import chex
import jax
import numpy as np
import pytest

import dms_jax
from experiments import pretrain


@pytest.fixture(scope="module")
def config():
    return pretrain.Config(
        steps=5,
        hidden_size=16,
        intermediate_size=32,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        sequence_length=256,
        batch_size=2,
        held_out_sequences=1,
        evaluate_every=3,
        workers=0,
    )


@pytest.mark.nightly
def test_a_small_run_is_stopped_goes_on_and_is_written(config, tmp_path, capsys, monkeypatch):
    def fewer(read, count):
        return lambda split: [text[:50_000] for text in read(split)[:count]]

    # Nine megabytes of prose, of which five small steps read next to nothing, take long to encode.
    monkeypatch.setattr(dms_jax.assets, "stories", fewer(dms_jax.assets.stories, 300))
    monkeypatch.setattr(dms_jax.assets, "books", fewer(dms_jax.assets.books, 2))
    stopped = dataclasses.replace(config, out=tmp_path / "run", stop_after_minutes=1e-9)
    cache = jax.config.jax_compilation_cache_dir
    pretrain.main(stopped)
    assert "stopped after step" in capsys.readouterr().out
    assert not (tmp_path / "run" / "summary.json").exists()
    pretrain.main(dataclasses.replace(config, out=tmp_path / "run"))
    jax.config.update("jax_compilation_cache_dir", cache)

    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    result = summary["result"]
    assert (result["steps"], result["tokens"]) == (5, 5 * 2 * 256)
    parts = {"linear", "arithmetic", "words", "needle", "tracking", "stories", "text"}
    assert result["held_out_loss"].keys() == parts
    assert all(0 < loss < 10 for loss in result["held_out_loss"].values())
    assert len((tmp_path / "run" / "log.jsonl").read_text().splitlines()) == 5

    wide, narrow = (dms_jax.load(tmp_path / "run" / name) for name in ("model", "bfloat16"))
    assert (wide.dtype, narrow.dtype) == ("float32", "bfloat16")
    assert narrow.policy == dms_jax.Vanilla()
    assert narrow.generation.eos_token_ids == (narrow.tokenizer.eos_token_id,)
    tokens = np.arange(12)[None]
    chex.assert_trees_all_close(wide.logits(tokens), narrow.logits(tokens), rtol=1e-7, atol=0.05)


def test_a_skipped_step_is_left_out_of_the_figures(config):
    figures = ("lm_loss", "visible_keys", "model_flops_utilisation")
    times = dict(tokens=8, seconds=1.0, data_seconds=0.1, tokens_per_second=8.0)
    records = [{"step": n, "skipped": n == 2, **times} for n in (1, 2, 3)]
    for record, loss in zip(records, (4.0, None, 2.0), strict=True):
        record |= dict.fromkeys(figures, loss)
    records[-1]["evaluation"] = {"prose": 1.0, "tasks": None}
    model = dms_jax.load(dms_jax.assets.path("stories260k"))
    found = pretrain.summarise(config, {"steps": 3}, model, records, 3.0)["result"]
    assert (found["training_loss"], found["visible_keys"], found["steps"]) == (3.0, 3.0, 3)


def test_minutes_become_steps_that_a_later_call_keeps(config, tmp_path, monkeypatch):
    """A step takes 0.5 s and an evaluation 1 s: how many fit beside compilation and writing."""
    config = dataclasses.replace(config, steps=None, minutes=10.0, evaluate_every=4, out=tmp_path)

    def train(model, *, recipe, on_step, **options):
        del model, options
        steps = range(recipe.total_steps(dms_jax.Vanilla()))
        for step in steps:
            on_step({"seconds": 0.5 if step else 20.0})

    clock = itertools.count(100.0)
    monkeypatch.setattr(pretrain.dms_jax, "train", train)
    monkeypatch.setattr(pretrain.time, "perf_counter", lambda: next(clock))
    plan = pretrain.make_plan(config, None, None, lambda model: {}, 100.0)
    # Readings of the clock: 100 and 101 around the evaluation, 102 after: 2 s are gone.
    assert plan["steps"] == int((600 - 2 - 20 - pretrain.RESERVE) / (0.5 + 1 / 4))
    monkeypatch.undo()
    assert pretrain.make_plan(config, None, None, None, 0.0) == plan
    told = dataclasses.replace(config, steps=7)
    assert pretrain.make_plan(told, None, None, None, 0.0) == {"steps": 7}


def test_documents_are_packed_in_order():
    documents = [([1, 2, 3], 1), ([4, 5], 2), ([6] * 9, 1), ([7, 8, 9, 10], 1), ([11], 0)]
    batch = pretrain.pack(iter(documents), 2, 6)
    chex.assert_trees_all_equal(
        batch["tokens"], np.array([[1, 2, 3, 4, 5, 0], [7, 8, 9, 10, 11, 0]])
    )
    chex.assert_trees_all_equal(
        batch["segment_ids"], np.array([[1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 2, 0]])
    )
    chex.assert_trees_all_equal(
        batch["loss_mask"],
        np.array(
            [
                [False, True, True, False, False, False],
                [False, True, True, True, True, False],
            ]
        ),
    )

    with pytest.raises(dms_jax.DataError, match="longer than 6 tokens"):
        pretrain.pack(itertools.repeat(([6] * 9, 1)), 2, 6)
