"""The recipe for a model that learns from answers of its own."""

import dataclasses

import pytest

from dms_jax.errors import ConfigError
from dms_jax.model.low_rank import LowRank
from dms_jax.policies import DMS
from dms_jax.training import recipes

ADAPTER = DMS(window=4, source="adapter")


def test_the_self_taught_recipe_is_what_was_measured_best():
    recipe = recipes.dms_self_taught()
    assert recipe.total_steps(ADAPTER) == 610
    assert recipe.batch_size * recipe.sequence_length == 32768
    assert (recipe.trainable, recipe.packing, recipe.answers_only) == (
        "low_rank",
        "first_fit",
        False,
    )
    ramp, last = recipe.stages
    assert (ramp.steps, ramp.warmup_steps, last.steps, last.final_learning_rate) == (
        305,
        30,
        305,
        0,
    )
    progress = recipe.progress(305, ADAPTER)
    assert progress.compression_ratio == pytest.approx(3.5)
    assert (progress.adapter_learning_rate, progress.learning_rate) == (3e-4, 2e-4)
    rates = {
        trainable: recipes.dms_self_taught(trainable=trainable).stages[0].learning_rate
        for trainable in ("adapter", "low_rank", "all")
    }
    assert rates == {"adapter": 3e-5, "low_rank": 2e-4, "all": 1e-5}
    fewer = recipes.dms_self_taught(4, tokens=5_000_000, batch_size=6, learning_rate=1e-4)
    assert fewer.total_steps(ADAPTER) == round(5_000_000 / (6 * 2048))
    assert fewer.micro_batch_size == 2  # divides the batch
    assert fewer.stages[0].learning_rate == 1e-4
    low = dataclasses.replace(recipe, low_rank=LowRank(4, 8))
    assert low.low_rank == LowRank(4, 8)


def test_a_self_taught_recipe_settles_at_the_ratio_it_reached():
    rate = dict(trainable="all", learning_rate=3e-5)
    recipe = recipes.dms_self_taught(4, tokens=100 * 32768, settle=0.3, **rate)
    assert [(stage.kind, stage.steps) for stage in recipe.stages] == [("ramp", 70), ("train", 30)]
    halfway, end = recipe.progress(85, ADAPTER), recipe.progress(99, ADAPTER)
    assert halfway.compression_ratio == end.compression_ratio == 4
    assert halfway.learning_rate == pytest.approx(1.5e-5)  # half a cosine from 3e-5 to 0
    assert halfway.adapter_learning_rate == pytest.approx(1.5e-4)
    assert end.learning_rate < 3e-7
    control = recipe.control(ADAPTER)
    assert [stage.final_learning_rate for stage in control.stages] == [None, 0]
    short = recipes.dms_self_taught(4, tokens=32768)
    assert short.settled(0.9) == short  # a ramp there always is
    assert short.settled(0) == short
    with pytest.raises(ConfigError, match="the last stage is no ramp but train"):
        recipe.settled(0.3)
    with pytest.raises(ConfigError, match="share"):
        short.settled(1.0)


@pytest.mark.parametrize(
    "options",
    [
        dict(tokens=0),
        dict(batch_size=0),
        dict(sequence_length=0),
        dict(compression_ratio=1),
        dict(settle=1),
        dict(settle=-0.1),
    ],
)
def test_a_self_taught_recipe_is_checked(options):
    with pytest.raises(ConfigError):
        recipes.dms_self_taught(**options)
