"""The recipes step by step, and the errors of malformed ones.

`test_paper_tables.py` holds the tables of the papers.
"""

import dataclasses

import optax
import pytest

import dms_jax
from dms_jax.errors import ConfigError, DataError
from dms_jax.policies import DMC, DMS, FixedPooling, KVpop, KVzap, Vanilla
from dms_jax.training import api, recipes
from dms_jax.training.recipe import Progress, Recipe, Stage, eviction_target

ADAPTER = DMS(window=4, source="adapter")
NEURON = DMS(window=4, source="query_neuron")
MERGING, POOLING = DMC(), FixedPooling(every=4)
DECAY = Stage("neuron_decay", 5, 1e-3)
RAMP = Stage("ramp", 10, 1e-3, 4.0)


def recipe_with(stages=(RAMP,), **changes):
    options = dict(name="test", stages=stages, sequence_length=8, batch_size=4) | changes
    return Recipe(**options)


@pytest.mark.parametrize(
    ("recipe", "policy", "total", "expected"),
    [
        (
            recipes.dms_published(16),
            ADAPTER,
            510,
            {0: (1, None), 34: (2, None), 102: (4, None), 238: (8, None), 999: (16, None)},
        ),
        (
            recipes.dms_paper(8),
            NEURON,
            2700,
            {
                0: (1, 1.0),
                500: (1, 0.75),
                1999: (1, 0.0005),
                2000: (1, None),
                2100: (2, None),
                2300: (4, None),
                2700: (8, None),
            },
        ),
        # A policy that borrows no neuron skips its decay.
        (recipes.dms_paper(4), ADAPTER, 300, {0: (1, None), 100: (2, None)}),
        (recipes.dms_quickstart(), ADAPTER, 105, {105: (8, None)}),
        (
            recipes.dmc_paper(4),
            MERGING,
            20_250,
            {125: (1, 0.5), 6250: (2, None), 18_250: (4, None), 20_249: (4, None)},
        ),
        (recipes.dmc_paper(4), POOLING, 20_000, {6000: (2, None)}),
        (
            recipes.dmc_quickstart(4),
            MERGING,
            460,
            {99: (1, 0.01), 180: (2, None), 459: (4, None)},
        ),
        (
            recipe_with(stages=(DECAY, Stage("train", 3, 1e-3), RAMP, Stage("train", 5, 1e-3))),
            ADAPTER,
            18,
            {2: (1, None), 8: (2.5, None), 15: (4, None), 99: (4, None)},
        ),
        (recipe_with(stages=(RAMP, Stage("ramp", 5, 1e-3, 4.0))), ADAPTER, 15, {12: (4, None)}),
        # A policy that learns nothing goes through every stage.
        (recipe_with(stages=(DECAY, RAMP)), Vanilla(), 15, {0: (1, None), 12: (1, None)}),
    ],
)
def test_ratio_and_neuron_step_by_step(recipe, policy, total, expected):
    assert recipe.total_steps(policy) == total
    for step, (ratio, scale) in expected.items():
        progress = recipe.progress(step, policy)
        assert progress.compression_ratio == pytest.approx(ratio)
        assert progress.target == pytest.approx(1 - 1 / ratio)
        assert progress.neuron_scale == pytest.approx(scale)
    assert eviction_target(8) == 0.875


def test_the_settings_of_the_released_code():
    recipe = recipes.dms_published(compression_ratio=8)
    assert (recipe.stages[-1].learning_rate, recipe.weight_decay) == (3e-5, 0)
    assert (recipe.sequence_length, recipe.batch_size, recipe.trainable) == (32768, 8, "auto")
    assert (recipe.ignore_end_token, recipe.distillation_positions) == (True, "inputs")


def test_the_settings_of_the_dmc_paper():
    recipe = recipes.dmc_paper(4)
    assert (recipe.sequence_length, recipe.batch_size) == (4096, 1024)
    for step, rate in ((18_250, 3e-5), (19_250, 1.65e-5), (20_249, 3e-6)):
        assert recipe.progress(step, MERGING).learning_rate == pytest.approx(rate, rel=1e-4)
    assert recipes.dmc_paper(2, model="llama-2-70b").stages[-1].learning_rate == 1.5e-5
    assert recipes.dmc_paper(2, steps_per_ratio=3000).stages[1].steps == 3000


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: recipes.dms_paper(8, model="qwen-r1-32b"), "qwen-r1-32b to .* 4, not 8"),
        (lambda: recipes.dms_paper(8, model="gpt-2"), "has no model 'gpt-2'"),
        (lambda: recipes.dmc_paper(2, model="gpt-2"), "has no model 'gpt-2'"),
        (lambda: recipes.dmc_paper(5, model="llama-2-7b"), "llama-2-7b to .* at most 4, not 5"),
        (lambda: recipes.dmc_paper(5, model="llama-2-13b"), "llama-2-13b to .* at most 4, not 5"),
        (lambda: recipes.dmc_paper(3, model="llama-2-70b"), "llama-2-70b to .* at most 2, not 3"),
    ],
)
def test_unpublished_settings_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_settled_recipe_holds_its_ratio_while_rates_fall():
    rate = dict(trainable="all", learning_rate=3e-5)
    recipe = recipes.dms_self_taught(4, tokens=100 * 32768, settle=0.3, **rate)
    assert [(stage.kind, stage.steps) for stage in recipe.stages] == [("ramp", 70), ("train", 30)]
    halfway, end = recipe.progress(85, ADAPTER), recipe.progress(99, ADAPTER)
    assert halfway.compression_ratio == end.compression_ratio == 4
    assert halfway.learning_rate == pytest.approx(1.5e-5)  # half a cosine from 3e-5 to 0
    assert halfway.adapter_learning_rate == pytest.approx(1.5e-4)
    assert end.learning_rate < 3e-7
    short = recipes.dms_self_taught(4, tokens=32768)
    assert short.settled(0.9) == short.settled(0) == short  # the ramp keeps a step
    with pytest.raises(ConfigError, match="the last stage is train, not a ramp"):
        recipe.settled(0.3)
    with pytest.raises(ConfigError, match="share"):
        short.settled(1.0)


@pytest.mark.parametrize(
    ("policy", "name"),
    [
        (ADAPTER, "dms_published"),
        (NEURON, "dms_published"),
        (MERGING, recipes.dmc_paper().name),
        (KVzap(), "kvzap"),
        (KVpop(), "kvpop"),
    ],
    ids=repr,
)
def test_every_trainable_policy_has_a_recommended_recipe(policy, name):
    found = recipes.recommended(policy, positions=512)
    assert (found.name, found.sequence_length) == (name, 512)
    assert recipes.recommended(policy, positions=2**20).sequence_length >= 2048


def test_retrofit_takes_the_recommended_recipe(monkeypatch):
    model = dms_jax.load(dms_jax.assets.path("stories260k"))
    asked = []
    monkeypatch.setattr(api, "train", lambda model, **options: asked.append(options) or model)
    dms_jax.retrofit(model, "KVzap", data=["Once"])
    wanted = dataclasses.replace(recipes.kvzap(), sequence_length=512)
    assert asked == [{"policy": KVzap(), "recipe": wanted, "data": ["Once"], "out": None}]
    with pytest.raises(DataError, match="retrofit learns from data=: texts"):
        dms_jax.retrofit(model, DMS())
    with pytest.raises(ConfigError, match=r"No recipe was made for FixedPooling.*give recipe="):
        dms_jax.retrofit(model, FixedPooling(), data=["Once"])


@pytest.mark.parametrize(
    ("warmup", "final"), [(0, None), (4, None), (0, 1e-4), (4, 0.0), (10, 0.0)]
)
def test_the_learning_rate_follows_optax(warmup, final):
    """A rise to the peak at the last step of the warm-up, then a half-cosine decay."""
    stage = Stage("train", 10, 2e-3, warmup_steps=warmup, final_learning_rate=final)
    rise = optax.linear_schedule(0.0, 2e-3, max(warmup, 1))
    fall = optax.cosine_decay_schedule(
        2e-3, max(10 - warmup, 1), 0 if final is None else final / 2e-3
    )
    for step in range(13):
        if step < warmup:
            expected = rise(step + 1)
        else:
            expected = 2e-3 if final is None else fall(step - warmup)
        found = Progress(stage, step, 1.0, None).learning_rate
        assert found == pytest.approx(float(expected), rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("policy", [ADAPTER, NEURON, MERGING, POOLING], ids=repr)
@pytest.mark.parametrize("make", [recipes.dms_published, recipes.dms_paper, recipes.dmc_paper])
def test_control_has_the_steps_of_the_retrofit(policy, make):
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
    assert rates(cosine, 0, 49, 525, 1000) == pytest.approx([2e-5, 1e-3, 5e-4, 0], abs=1e-9)
    held = recipes.pretraining(1000, learning_rate=1e-3, warmup_steps=50, decay_share=0.2)
    assert cosine.total_steps(Vanilla()) == held.total_steps(Vanilla()) == 1000
    assert rates(held, 49, 799, 800, 900) == pytest.approx([1e-3, 1e-3, 1e-3, 5e-4])
    # Warm-up is capped at a tenth of a short run.
    assert rates(recipes.pretraining(20, learning_rate=1e-3), 0, 1) == pytest.approx([5e-4, 1e-3])
    assert recipes.pretraining(1).total_steps(Vanilla()) == 1
    for steps, share in ((0, 1.0), (10, 0.0), (10, 1.5)):
        with pytest.raises(ConfigError, match=r"pretraining: (steps|decay_share) must be"):
            recipes.pretraining(steps, decay_share=share)


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
        (dict(compression_weight=float("nan")), "compression_weight must be .* at least 0"),
        (dict(snapshots=(8.0,)), "snapshots must lie above 1 and up to 4"),
        (dict(snapshots=(1,)), "snapshots must lie above 1"),
        (dict(text_weight=0.5, loss="language_modeling"), "text_weight adds a loss on the text"),
        (dict(text_weight=0.5, distillation_positions="inputs"), "text_weight adds"),
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
        (dict(adapter_learning_rate=float("inf")), "learning_rate must be a finite number"),
        (dict(compression_ratio=0.5), "compression_ratio must be a finite number of at least 1"),
        (dict(kind="train"), "only a ramp changes the compression_ratio"),
        (dict(warmup_steps=11), "warmup_steps must lie between 0 and the stage's 10 steps"),
    ],
)
def test_a_bad_stage_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(RAMP, **changes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        *(
            (lambda make=make, ratio=ratio: make(ratio), "compression_ratio must be .* above 1")
            for make in (
                recipes.dms_published,
                recipes.dms_paper,
                recipes.dms_quickstart,
                recipes.dmc_paper,
                recipes.dms_self_taught,
            )
            for ratio in (1, float("nan"), float("inf"))
        ),
        (lambda: recipes.dms_self_taught(tokens=0), "tokens"),
        (lambda: recipes.dms_self_taught(batch_size=0), "batch_size"),
        (lambda: recipes.dms_self_taught(sequence_length=0), "sequence_length"),
        (lambda: recipes.dms_self_taught(settle=1), "share"),
    ],
)
def test_bad_numbers_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_passes_must_divide_over_the_data_shards():
    recipe = recipe_with(micro_batch_size=2)
    assert [recipe.pass_size(1), recipe.pass_size(2), recipe_with().pass_size(2)] == [2, 4, 4]
    with pytest.raises(ConfigError, match="passes of 8 sequences over 4 shards"):
        recipe.pass_size(4)
    with pytest.raises(ConfigError, match="over 3 shards"):
        recipe_with().pass_size(3)


def test_a_recipe_is_scaled_to_a_number_of_steps_or_tokens():
    paper = recipes.dms_paper(4, model="qwen-r1-32b")  # 2000 steps of 1024, 12000 of 256
    assert paper.total_tokens(NEURON) == (2000 * 1024 + 12_000 * 256) * 8192
    small = paper.scaled(NEURON, steps=70)
    assert [(s.kind, s.steps) for s in small.stages] == [("neuron_decay", 10), ("ramp", 60)]
    assert [s.learning_rate for s in small.stages] == [s.learning_rate for s in paper.stages]
    assert small.compression_ratio == 4
    fewer = paper.scaled(NEURON, tokens=paper.total_tokens(NEURON) // 100)
    assert [stage.steps for stage in fewer.stages] == [20, 120]
    # Stages that a policy skips do not count, and every other keeps a step.
    assert recipes.dms_published(8).scaled(ADAPTER, steps=7).total_steps(ADAPTER) == 7
    assert [s.steps for s in recipes.dmc_paper(2).scaled(MERGING, steps=3).stages] == [1, 1, 1]
    for steps in (4, 5, 11, 997):
        assert recipes.dmc_paper(2).scaled(MERGING, steps=steps).total_steps(MERGING) == steps
    warm = recipes.pretraining(1000, warmup_steps=100).scaled(Vanilla(), steps=100)
    assert warm.stages[0].warmup_steps == 10
    assert recipes.dms_quickstart(8).scaled(ADAPTER, steps=1050).total_steps(ADAPTER) == 1050


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
        recipes.dmc_paper(2).scaled(MERGING, **options)


def test_trained_parameters_of_each_policy():
    recipe = recipes.dms_published()
    assert recipe.trained_for(ADAPTER) == "adapter"
    assert recipe.trained_for(NEURON) == recipe.control(ADAPTER).trainable == "all"
    low = dataclasses.replace(recipe, trainable="low_rank")
    assert low.trained_for(ADAPTER) == low.control(ADAPTER).trainable == "low_rank"
