"""Learned evictions beside each other: what is fitted, counted and compared."""

import dataclasses
import json

import chex
import numpy as np
import pytest

import dms_jax
from dms_jax.data import batches as data_batches
from experiments.reproduction import learned_evictions
from experiments.reproduction.evictions import page
from experiments.reproduction.evictions.jobs import kept_shares
from experiments.reproduction.evictions.plan import SYSTEMS, VANILLA, WINDOW, Config, Paths
from experiments.reproduction.files import write_json


def test_every_system_sees_the_same_tokens_and_is_fitted_to_the_same_share():
    config = Config(steps=50)
    for system in SYSTEMS.values():
        if system.recipe is not None:
            recipe = system.make_recipe(config)
            tokens = recipe.total_steps(system.policy) * recipe.batch_size * recipe.sequence_length
            assert tokens == config.tokens
            assert recipe.trained_for(system.policy) == system.trainable
    # A quarter of 420 - 17 tokens, and the window of 17.
    live = round(17 + 403 / 4)
    assert SYSTEMS["kvpop"].budgeted(4.0, "reasoning").budget == live - 1
    assert SYSTEMS["tova"].budgeted(4.0, "reasoning").budget == live - 1
    assert SYSTEMS["streaming"].budgeted(4.0, "reasoning").budget == live
    assert SYSTEMS["kvzap"].budgeted(4.0, "reasoning") is None
    assert SYSTEMS["dms"].policy.window == SYSTEMS["kvpop"].policy.window == WINDOW


@pytest.mark.nightly
def test_shares_are_counted_over_documents():
    stories = dms_jax.load(dms_jax.assets.path("stories260k"))
    policy = dms_jax.RandomEviction(window=2, rate=0.25)
    batch = next(
        data_batches(["Once upon a time."] * 4, stories.tokenizer, batch_size=2, length=64)
    )
    ids = np.ones((2, 64), np.int32)
    ids[:, 40:] = 0
    kept = np.asarray(kept_shares(stories, policy, [batch | {"segment_ids": ids}]))
    assert kept.shape == (stories.config.num_layers, stories.config.num_kv_heads)
    assert abs(kept.mean() - 0.75) < 0.05


def made(system: str, ratio: float, peak: float, accuracy: float) -> dict:
    """A result whose 10 problems are solved in order of difficulty."""
    scores = [1.0] * round(10 * accuracy) + [0.0] * round(10 - 10 * accuracy)
    part = dict(accuracy=accuracy, error=0.1, scores=scores, peak=peak, reads=9.0)
    uneven = system.startswith("dms")
    return dict(
        system=system,
        ratio=ratio,
        kept=[[0.0, 0.0], [0.1, 0.9]] if uneven else None,
        answers={"reasoning": part, "retrieval": part},
        text=dict(losses=[2 - accuracy, 2.5 - accuracy], peak=peak, live=peak, reads=9.0),
        device="none",
        versions={"jax": "1"},
        date="today",
    )


def test_the_page_compares_at_the_tokens_of_dms(tmp_path):
    config = Config(out=tmp_path)
    paths = Paths(config)
    for result in (
        made(VANILLA, 1.0, 400.0, 0.9),
        made("dms", 4.0, 100.0, 0.7),
        made("dms", 8.0, 50.0, 0.5),
        made("kvzap", 4.0, 200.0, 0.8),  # halfway in the logarithm
        made("kvzap", 8.0, 50.0, 0.4),
        made("tova", 8.0, 70.0, 0.1),
    ):
        write_json(paths.result(result["system"], result["ratio"]), result)
    step = {"step": 7, "distillation_loss": 0.5}
    write_json(paths.summary("dms"), dict(tokens=1e6, step_seconds=0.1, steps=[step]))
    assert learned_evictions.main(dataclasses.replace(config, only="report")) == 0
    found = json.loads((tmp_path / "results.json").read_text())
    gaps = {
        (row["system"], row["ratio"], row["measure"]): row["difference"]
        for row in found["against_dms"]
    }
    assert gaps["kvzap", 4.0, "reasoning"] == pytest.approx(0.6 - 0.7)
    assert gaps["kvzap", 8.0, "retrieval"] == pytest.approx(-0.1)
    assert gaps["kvzap", 8.0, "text"] == pytest.approx(0.1)
    assert gaps[VANILLA, 8.0, "reasoning"] == pytest.approx(0.4)
    assert ("tova", 8.0, "reasoning") not in gaps  # one point, elsewhere


def test_points_are_interpolated_and_not_extrapolated():
    known = [(100.0, np.array([1.0, 0.0])), (400.0, np.array([1.0, 1.0]))]
    chex.assert_trees_all_close(page.at(known, 200.0), np.array([1.0, 0.5]))
    chex.assert_trees_all_equal(page.at(known, 101.0), known[0][1])
    assert page.at(known, 80.0) is None
    assert page.at(known[:1], 120.0) is None
