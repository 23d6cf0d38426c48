"""The published recipes step by step, and the errors of malformed recipes."""

import dataclasses

import optax
import pytest

from dms_jax.errors import ConfigError
from dms_jax.policies import DMC, DMS, FixedPooling, Vanilla
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


def test_what_the_paper_did_not_do_is_refused():
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
    assert recipe.distillation_positions == "inputs"


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
    # A policy that borrows no neuron has none to decay.
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


@pytest.mark.parametrize(
    ("model", "most"), [("llama-2-7b", 4), ("llama-2-13b", 4), ("llama-2-70b", 2)]
)
def test_what_the_dmc_paper_did_not_do_is_refused(model, most):
    assert recipes.dmc_paper(most, model=model).compression_ratio == most
    message = f"takes {model} to a compression ratio of at most {most}, not {most + 1}"
    with pytest.raises(ConfigError, match=message):
        recipes.dmc_paper(most + 1, model=model)


def test_the_dmc_quickstart_takes_some_hundred_steps():
    recipe = recipes.dmc_quickstart(4, snapshots=(2,))
    assert recipe.total_steps(DMC()) == 100 + 240 + 120
    assert recipe.progress(99, DMC()).neuron_scale == pytest.approx(0.01)
    assert recipe.progress(180, DMC()).compression_ratio == pytest.approx(2)
    assert recipe.progress(459, DMC()).compression_ratio == 4


def recipe_with(stages=(Stage("ramp", 10, 1e-3, 4.0),), **changes):
    options = dict(name="test", stages=stages, sequence_length=8, batch_size=4) | changes
    return Recipe(**options)


@pytest.mark.parametrize(
    ("warmup", "final"), [(0, None), (4, None), (0, 1e-4), (4, 0.0), (10, 0.0)]
)
def test_the_learning_rate_follows_optax(warmup, final):
    """A rise to the peak at the last step of the warm-up, then a half-cosine decay."""
    rise = optax.linear_schedule(0.0, 2e-3, max(warmup, 1))
    fall = optax.cosine_decay_schedule(
        2e-3, max(10 - warmup, 1), 0 if final is None else final / 2e-3
    )
    for step in range(13):
        found = schedules.learning_rate(step, peak=2e-3, steps=10, warmup_steps=warmup, final=final)
        if step < warmup:
            expected = rise(step + 1)
        else:
            expected = 2e-3 if final is None else fall(step - warmup)
        assert found == pytest.approx(float(expected), rel=1e-5, abs=1e-9)


def test_both_groups_of_parameters_follow_the_schedule():
    stage = Stage(
        "train", 10, 1e-3, warmup_steps=2, adapter_learning_rate=1e-2, final_learning_rate=1e-4
    )
    recipe = recipe_with(stages=(RAMP, stage))
    progress = recipe.progress(10, ADAPTER)
    assert progress.learning_rate == pytest.approx(5e-4)
    assert progress.adapter_learning_rate == pytest.approx(5e-3)
    middle = recipe.progress(16, ADAPTER)
    assert middle.learning_rate == pytest.approx((1e-3 + 1e-4) / 2)
    assert middle.adapter_learning_rate == pytest.approx((1e-2 + 1e-4) / 2)


def test_a_stage_that_trains_holds_the_ratio():
    recipe = recipe_with(stages=(DECAY, Stage("train", 3, 1e-3), RAMP, Stage("train", 5, 1e-3)))
    assert recipe.compression_ratio == 4
    assert recipe.total_steps(ADAPTER) == 18
    assert recipe.progress(2, ADAPTER).compression_ratio == 1
    assert recipe.progress(3 + 5, ADAPTER).compression_ratio == pytest.approx(2.5)
    assert recipe.progress(3 + 10 + 2, ADAPTER).compression_ratio == 4
    assert recipe.progress(99, ADAPTER).compression_ratio == 4
    assert recipe.progress(5 + 3, NEURON).neuron_scale is None


def test_a_policy_that_learns_nothing_stays_at_ratio_1():
    recipe = recipe_with(stages=(DECAY, RAMP))
    assert recipe.total_steps(Vanilla()) == 15
    for step in (0, 5, 12, 50):
        progress = recipe.progress(step, Vanilla())
        assert (progress.compression_ratio, progress.target) == (1, 0)
        assert progress.neuron_scale is None


@pytest.mark.parametrize("policy", [ADAPTER, NEURON, DMC(), FixedPooling(every=4)], ids=repr)
@pytest.mark.parametrize(
    "make", [recipes.dms_published, recipes.dms_paper, recipes.dms_quickstart, recipes.dmc_paper]
)
def test_the_control_goes_through_the_steps_of_the_retrofit(policy, make):
    recipe = make(4)
    control = recipe.control(policy)
    total = recipe.total_steps(policy)
    assert control.total_steps(Vanilla()) == total
    for step in range(0, total, max(1, total // 50)):
        own, other = control.progress(step, Vanilla()), recipe.progress(step, policy)
        assert own.learning_rate == other.learning_rate
        assert (own.stage.batch_size, own.step) == (other.stage.batch_size, other.step)
        assert (own.compression_ratio, own.neuron_scale) == (1, None)
    assert (control.loss, control.trainable) == ("language_modeling", "all")
    assert (control.batch_size, control.sequence_length, control.ignore_end_token) == (
        recipe.batch_size,
        recipe.sequence_length,
        recipe.ignore_end_token,
    )


def test_pretraining_warms_up_and_falls():
    rates = lambda recipe, *steps: [  # noqa: E731
        recipe.progress(step, Vanilla()).learning_rate for step in steps
    ]
    cosine = recipes.pretraining(1000, learning_rate=1e-3, warmup_steps=50)
    assert cosine.total_steps(Vanilla()) == 1000
    assert rates(cosine, 0, 49, 525, 1000) == pytest.approx([2e-5, 1e-3, 5e-4, 0], abs=1e-9)
    held = recipes.pretraining(1000, learning_rate=1e-3, warmup_steps=50, decay_share=0.2)
    assert held.total_steps(Vanilla()) == 1000
    assert rates(held, 49, 799, 800, 900) == pytest.approx([1e-3, 1e-3, 1e-3, 5e-4])
    # Warm-up is capped at a tenth of a short run.
    assert rates(recipes.pretraining(20, learning_rate=1e-3), 0, 1) == pytest.approx([5e-4, 1e-3])
    assert recipes.pretraining(1).total_steps(Vanilla()) == 1
    for steps, share in ((0, 1.0), (10, 0.0), (10, 1.5)):
        with pytest.raises(ConfigError, match=r"pretraining: (steps|decay_share) must be"):
            recipes.pretraining(steps, decay_share=share)


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
        (dict(beta2=1.0), "beta2 must be .* below 1"),
        (dict(distillation_temperature=0.0), "distillation_temperature must be .* above 0"),
        (dict(clip=0.0), "clip must be .* above 0"),
        (dict(weight_decay=-0.1), "weight_decay must be"),
        (dict(compression_weight=-1.0), "compression_weight must be .* at least 0"),
        (dict(head_balance=float("nan")), "head_balance must be .* at least 0"),
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
        (dict(steps=0), "steps must be a whole number of at least 1"),
        (dict(learning_rate=-1e-3), "learning_rate must be a finite number of at least 0"),
        (dict(learning_rate=float("nan")), "learning_rate must be a finite number of at least 0"),
        (
            dict(adapter_learning_rate=float("inf")),
            "learning_rate must be a finite number of at least 0",
        ),
        (dict(compression_ratio=0.5), "compression_ratio must be a finite number of at least 1"),
        (dict(kind="train"), "only a ramp changes the compression_ratio"),
        (dict(final_learning_rate=-1.0), "learning_rate must be a finite number of at least 0"),
        (dict(warmup_steps=11), "warmup_steps must lie between 0 and the stage's 10 steps"),
        (dict(warmup_steps=-1), "warmup_steps must be"),
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
    with pytest.raises(ConfigError, match="compression_ratio must be a finite number above 1"):
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


def test_a_recipe_is_scaled_to_a_number_of_steps_or_tokens():
    paper = recipes.dms_paper(4, model="qwen-r1-32b")  # 2000 steps of 1024, 12000 of 256
    assert paper.total_tokens(NEURON) == (2000 * 1024 + 12_000 * 256) * 8192
    small = paper.scaled(NEURON, steps=70)
    assert [(s.kind, s.steps) for s in small.stages] == [("neuron_decay", 10), ("ramp", 60)]
    assert [s.learning_rate for s in small.stages] == [s.learning_rate for s in paper.stages]
    assert small.compression_ratio == 4
    assert paper.scaled(NEURON, tokens=paper.total_tokens(NEURON) // 100) == dataclasses.replace(
        paper,
        stages=(
            dataclasses.replace(paper.stages[0], steps=20),
            dataclasses.replace(paper.stages[1], steps=120),
        ),
    )
    # Stages that a policy skips do not count, and every other keeps a step.
    assert recipes.dms_published(8).scaled(ADAPTER, steps=7).total_steps(ADAPTER) == 7
    tiny = recipes.dmc_paper(2).scaled(DMC(), steps=3)
    assert [s.steps for s in tiny.stages] == [1, 1, 1]
    for steps in (4, 5, 11, 997):
        assert recipes.dmc_paper(2).scaled(DMC(), steps=steps).total_steps(DMC()) == steps
    warm = recipes.pretraining(1000, warmup_steps=100).scaled(Vanilla(), steps=100)
    assert warm.stages[0].warmup_steps == 10
    longer = recipes.dms_quickstart(8).scaled(ADAPTER, steps=1050)
    assert longer.total_steps(ADAPTER) == 1050


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(), "steps or tokens"),
        (dict(steps=10, tokens=10), "steps or tokens"),
        (dict(steps=2), "has 3 stages, so it takes at least 3 steps, not 2"),
        (dict(steps=0), "steps must be"),
        (dict(tokens=4096), r"at least 3 steps"),
    ],
)
def test_a_recipe_cannot_be_scaled_to_nothing(options, message):
    with pytest.raises(ConfigError, match=message):
        recipes.dmc_paper(2).scaled(DMC(), **options)


def test_what_a_policy_trains():
    recipe = recipes.dms_published()
    assert recipe.trained_for(ADAPTER) == "adapter"
    assert recipe.trained_for(NEURON) == "all"
    low = dataclasses.replace(recipe, trainable="low_rank")
    assert low.trained_for(ADAPTER) == "low_rank"
    assert low.control(ADAPTER).trainable == "low_rank"
    assert recipe.control(ADAPTER).trainable == "all"
