"""The published recipes step by step, and what a recipe refuses."""

import dataclasses

import pytest

from dms_jax.errors import ConfigError
from dms_jax.policies import DMC, DMS, FixedPooling
from dms_jax.training import recipes, schedules
from dms_jax.training.recipe import Recipe, Stage

ADAPTER = DMS(window=4, source="adapter")
NEURON = DMS(window=4, source="query_neuron")


@pytest.mark.parametrize(
    ("step", "ratio", "target"),
    [
        (0, 1, 0),
        (34, 2, 0.5),
        (102, 4, 0.75),
        (238, 8, 0.875),
        (510, 16, 0.9375),
        (999, 16, 0.9375),
    ],
)
def test_the_ramp_of_the_released_code(step, ratio, target):
    found = schedules.compression_ratio(step, start=1, end=16, steps=510)
    assert found == pytest.approx(ratio)
    assert schedules.eviction_target(found) == pytest.approx(target)
    progress = recipes.dms_published(16).progress(step, ADAPTER)
    assert progress.compression_ratio == pytest.approx(ratio)
    assert progress.target == pytest.approx(target)


@pytest.mark.parametrize(
    ("step", "ratio", "target"), [(100, 2, 0.5), (300, 4, 0.75), (700, 8, 0.875)]
)
def test_the_ramp_of_the_paper_follows_the_decay(step, ratio, target):
    recipe = recipes.dms_paper(8)
    progress = recipe.progress(2000 + step, NEURON)
    assert progress.compression_ratio == pytest.approx(ratio)
    assert progress.target == pytest.approx(target)
    assert progress.neuron_scale is None
    assert recipe.total_steps(NEURON) == 2700


def test_the_neuron_decays_over_2000_steps_while_nothing_is_evicted():
    recipe = recipes.dms_paper(4)
    for step, scale in [(0, 1.0), (500, 0.75), (1999, 0.0005)]:
        progress = recipe.progress(step, NEURON)
        assert progress.neuron_scale == pytest.approx(scale)
        assert progress.target == 0
    assert recipe.progress(2000, NEURON).neuron_scale is None


def test_a_policy_that_borrows_no_neuron_skips_its_decay():
    recipe = recipes.dms_paper(4)
    assert recipe.total_steps(ADAPTER) == 300
    assert recipe.progress(0, ADAPTER).neuron_scale is None
    assert recipe.progress(100, ADAPTER).compression_ratio == pytest.approx(2)


def test_the_tables_of_the_paper():
    small = recipes.dms_paper(8, model="qwen-r1-7b")
    rows = [(s.kind, s.steps, s.learning_rate, s.compression_ratio) for s in small.stages]
    assert rows == [
        ("neuron_decay", 2000, 1e-6, 1.0),
        ("ramp", 9000, 1e-5, 4.0),
        ("ramp", 12000, 2e-5, 8.0),
    ]
    assert (small.beta1, small.beta2, small.weight_decay, small.clip) == (0.9, 0.95, 0.1, 1.0)
    assert (small.sequence_length, small.batch_size, small.loss) == (8192, 1024, "distillation")
    assert small.progress(11_000, NEURON).compression_ratio == pytest.approx(4)
    large = recipes.dms_paper(4, model="qwen-r1-32b")
    assert [(s.steps, s.batch_size or large.batch_size) for s in large.stages] == [
        (2000, 1024),
        (12000, 256),
    ]
    llama = recipes.dms_paper(3, model="llama-2-7b")
    assert llama.loss == "language_modeling"
    assert [s.steps for s in llama.stages] == [2000, 6000]
    with pytest.raises(ConfigError, match="takes qwen-r1-32b to a compression ratio of 4, not 8"):
        recipes.dms_paper(8, model="qwen-r1-32b")
    with pytest.raises(ConfigError, match="has no model 'gpt-2'"):
        recipes.dms_paper(8, model="gpt-2")


def test_the_recipe_of_the_released_code():
    recipe = recipes.dms_published(compression_ratio=8)
    (_, ramp) = recipe.stages
    assert (ramp.steps, ramp.learning_rate, recipe.weight_decay) == (238, 3e-5, 0)
    assert (recipe.sequence_length, recipe.batch_size, recipe.kl) == (32768, 8, "reverse")
    assert recipe.trainable == "auto"
    assert recipe.ignore_end_token


def test_the_quickstart_takes_105_steps():
    recipe = recipes.dms_quickstart(snapshots=(2, 4))
    assert recipe.total_steps(ADAPTER) == 105
    (stage,) = recipe.stages
    assert (stage.learning_rate, stage.adapter_learning_rate) == (1e-4, 3e-4)


def test_the_recipe_of_the_dmc_paper():
    recipe = recipes.dmc_paper(4)
    rows = [(s.kind, s.steps, s.learning_rate, s.final_learning_rate) for s in recipe.stages]
    assert rows == [
        ("neuron_decay", 250, 3e-5, None),
        ("ramp", 18_000, 3e-5, None),
        ("train", 2000, 3e-5, pytest.approx(3e-6)),
    ]
    assert (recipe.beta1, recipe.beta2, recipe.weight_decay, recipe.clip) == (0.9, 0.95, 0.1, 1.0)
    assert (recipe.sequence_length, recipe.batch_size) == (4096, 1024)
    assert (recipe.loss, recipe.trainable) == ("language_modeling", "all")
    merging = DMC()
    assert recipe.progress(125, merging).neuron_scale == 0.5
    assert recipe.progress(250 + 6000, merging).compression_ratio == pytest.approx(2)
    for step, rate in ((18_250, 3e-5), (19_250, 1.65e-5), (20_249, 3e-6)):
        progress = recipe.progress(step, merging)
        assert progress.compression_ratio == 4
        assert progress.learning_rate == pytest.approx(rate, rel=1e-4)
    assert recipes.dmc_paper(2, model="llama-2-70b").stages[-1].learning_rate == 1.5e-5
    small = recipes.dmc_paper(2, model="llama-3.2-1b")
    assert (small.loss, small.stages[0].steps) == ("distillation", 2000)
    # Nothing to decay where nothing is borrowed.
    assert recipe.total_steps(FixedPooling(every=4)) == 20_000


def test_the_ablations_of_the_dmc_paper():
    assert recipes.dmc_paper(2, steps_per_ratio=3000).stages[1].steps == 3000
    assert recipes.dmc_paper(2, variant="local_prior").prior == "layer"
    assert recipes.dmc_paper(2, variant="dmc-c").head_balance == 1.0
    at_once = recipes.dmc_paper(4, variant="immediate")
    assert at_once.total_steps(DMC()) == recipes.dmc_paper(4).total_steps(DMC())
    assert at_once.progress(251, DMC()).compression_ratio == 4
    assert recipes.dmc_paper(4).progress(251, DMC()).compression_ratio < 1.001
    with pytest.raises(ConfigError, match="has no model 'gpt-2'"):
        recipes.dmc_paper(2, model="gpt-2")


def recipe_with(stages=(Stage("ramp", 10, 1e-3, 4.0),), **changes):
    options = dict(name="test", stages=stages, sequence_length=8, batch_size=4) | changes
    return Recipe(**options)


DECAY = Stage("neuron_decay", 5, 1e-3)
RAMP = Stage("ramp", 10, 1e-3, 4.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(stages=()), "there is no stage"),
        (dict(stages=(DECAY,)), "nothing comes after the decay"),
        (dict(stages=(RAMP, DECAY)), "only the first stage"),
        (dict(stages=(RAMP, Stage("ramp", 1, 1e-3, 2.0))), "may not fall"),
        (dict(sequence_length=0), "sequence_length must be a whole number"),
        (dict(batch_size=-1), "batch_size must be a whole number"),
        (dict(micro_batch_size=3), "batch of 4 does not divide into passes of 3"),
        (dict(beta2=1.0), "beta2 must lie"),
        (dict(clip=0.0), "clip must be positive"),
        (dict(weight_decay=-0.1), "weight_decay must be"),
        (dict(compression_weight=-1.0), "compression_weight must be >= 0"),
        (dict(head_balance=float("nan")), "head_balance must be >= 0"),
        (dict(snapshots=(8.0,)), "snapshots must lie above 1 and up to 4"),
        (dict(snapshots=(1,)), "snapshots must lie above 1"),
    ],
)
def test_a_bad_recipe_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        recipe_with(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(steps=0), "steps >= 1"),
        (dict(learning_rate=-1e-3), "learning rates must be"),
        (dict(learning_rate=float("nan")), "learning rates must be"),
        (dict(adapter_learning_rate=float("inf")), "learning rates must be"),
        (dict(compression_ratio=0.5), "compression_ratio must be a number >= 1"),
        (dict(batch_size=0), "batch_size must be"),
    ],
)
def test_a_bad_stage_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(RAMP, **changes)


@pytest.mark.parametrize(
    "make", [recipes.dms_published, recipes.dms_paper, recipes.dms_quickstart, recipes.dmc_paper]
)
@pytest.mark.parametrize("ratio", [1, 0.5, float("nan"), float("inf")])
def test_a_ratio_that_compresses_nothing_is_refused(make, ratio):
    with pytest.raises(ConfigError, match="compression_ratio must be a number above 1"):
        make(ratio)


def test_passes_must_divide_over_the_data_shards():
    recipe = recipe_with(micro_batch_size=2)
    assert recipe.pass_size(1) == 2
    assert recipe.pass_size(2) == 4
    with pytest.raises(ConfigError, match="passes of 8 sequences over 4 shards"):
        recipe.pass_size(4)
    assert recipe_with().pass_size(2) == 4
    with pytest.raises(ConfigError, match="over 3 shards"):
        recipe_with().pass_size(3)


def test_a_stage_at_constant_ratio_holds_it():
    recipe = recipe_with(stages=(RAMP, Stage("ramp", 5, 1e-3, 4.0)))
    assert recipe.progress(12, ADAPTER).compression_ratio == 4.0
    assert recipe.progress(99, ADAPTER).compression_ratio == 4.0
