"""Learned evictions beside each other: the plan, what is fitted, and the page."""

import dataclasses
import json

import chex
import numpy as np
import pytest

import dms_jax
from dms_jax.data import batches as data_batches
from experiments.reproduction import learned_evictions
from experiments.reproduction.evictions import page
from experiments.reproduction.evictions.jobs import (
    Worker,
    check_settings,
    kept_shares,
)
from experiments.reproduction.evictions.plan import (
    RATIOS,
    SYSTEMS,
    VANILLA,
    WINDOW,
    Config,
    Job,
    Paths,
    jobs,
)
from experiments.reproduction.files import write_json
from experiments.reproduction.runs import read_plan, write_plan


def test_what_the_others_need_comes_first():
    config = Config(shards=2)
    order = jobs(config)
    assert len({job.name for job in order}) == len(order)
    assert [job.name for job in order[:4]] == [
        "data-data-0",
        "data-data-1",
        "training-dms-1",
        "training-kvzap-1",
    ]
    asked = [(job.system, job.ratio) for job in order if job.kind == "asking"]
    assert asked[0] == (VANILLA, 1.0)
    assert len(asked) == 1 + len(RATIOS) * (len(SYSTEMS) - 1)
    few = jobs(Config(systems=("kvpop", "tova"), shards=1))
    assert [job.kind for job in few] == ["data", "training", *["asking"] * 4]
    with pytest.raises(dms_jax.ConfigError, match="'h2o'; there are vanilla"):
        Config(systems=("h2o",))
    with pytest.raises(dms_jax.ConfigError, match="steps must be positive"):
        Config(steps=0)


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


def test_jobs_wait_for_what_they_need(tmp_path):
    config = Config(out=tmp_path, shards=1)
    write_plan(config)
    assert read_plan(Config, tmp_path) == config
    check_settings(dataclasses.replace(config, processes=3))
    with pytest.raises(dms_jax.ConfigError, match="steps=800, not 7"):
        check_settings(dataclasses.replace(config, steps=7))
    paths = Paths(config)
    asking, training = Job("asking", "kvzap", 4.0), Job("training", "kvzap")
    assert not paths.ready(training)
    assert not paths.ready(asking)
    assert paths.ready(Job("asking", "tova", 4.0))
    write_json(paths.data(0), {})
    assert paths.ready(training)
    write_json(paths.summary("kvzap"), {})
    assert paths.done(training)
    assert paths.ready(asking)
    names = [job.name for job in Worker(config, 0.0).wanted()]
    assert "data-data-0" not in names
    assert "training-kvzap-1" not in names
    assert "training-kvpop-1" in names
    (paths.training("dms") / "snapshots" / "4").mkdir(parents=True)
    assert paths.model("dms", 4.0).name == "4"
    assert paths.model("dms", 8.0).name == "model"


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
    text = (tmp_path / "README.md").read_text()
    assert "- KVzap: below DMS at every setting" not in text  # by less than two errors
    assert "| DMS | 1/4 | 70.0 ± 10.0 | 100 | 9 |" in text
    assert "| DMS | all | 1.0M | 100 | 0.5000 |" in text
    assert "| DMS | 1/4 | 0.000 | 0.900 | 90% | 50% | 0.000 |" in text


def test_points_are_interpolated_and_not_extrapolated():
    known = [(100.0, np.array([1.0, 0.0])), (400.0, np.array([1.0, 1.0]))]
    chex.assert_trees_all_close(page.at(known, 200.0), np.array([1.0, 0.5]))
    chex.assert_trees_all_equal(page.at(known, 101.0), known[0][1])
    assert page.at(known, 80.0) is None
    assert page.at(known[:1], 120.0) is None


def test_the_page_says_what_was_not_measured():
    whole = {name: {ratio: {} for ratio in RATIOS} for name in SYSTEMS}
    assert page._left_out(whole) == []
    half = whole | {"kvpop": {4.0: {}}}
    assert page._left_out(half) == ["", f"Not measured at 1/8: {SYSTEMS['kvpop'].label}."]
