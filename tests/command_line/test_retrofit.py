"""`dms-jax retrofit`: presets, files and errors."""

import contextlib
import dataclasses
import inspect
import pathlib

import pytest

import dms_jax
from dms_jax.command_line import retrofit
from dms_jax.data import Exchange

STORIES, CUSTOM = (retrofit.PRESETS[name][1] for name in ("stories260k", "custom"))


def test_a_small_run_is_written_and_loads(tmp_path, capsys):
    config = dataclasses.replace(
        STORIES,
        out=tmp_path,
        compression_ratio=1.2,
        sequence_length=32,
        batch_size=2,
        options=("window=8",),
        tensorboard=True,
    )
    retrofit.main(config)
    assert "3 steps to ratio 1.2" in capsys.readouterr().out
    model = dms_jax.load(tmp_path / "model")
    assert model.policy == dms_jax.DMS(window=8, source="adapter")
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 3
    assert list((tmp_path / "tensorboard").glob("events*"))


def test_a_recipe_is_scaled_down():
    _, config = retrofit.PRESETS["llama-3.2-1b"]
    recipe = dataclasses.replace(config, steps=110).make_recipe()
    assert [stage.steps for stage in recipe.stages] == [20, 90]
    few = dataclasses.replace(config, tokens=11_000 * 4 * 512, sequence_length=512, batch_size=4)
    assert few.make_recipe().total_tokens(config.make_policy()) == 11_000 * 4 * 512
    warm = dataclasses.replace(config, distillation_temperature=2.0).make_recipe()
    assert warm.distillation_temperature == 2.0


def test_sequence_length_is_capped_at_model_positions():
    """The first command of the help used to fail for models of fewer than 32,768 positions."""
    config = CUSTOM
    recipe, policy = config.make_recipe(4096), config.make_policy()
    assert recipe.sequence_length == 4096 < config.make_recipe().sequence_length
    assert config.make_recipe(2**20) == config.make_recipe()
    asked = dataclasses.replace(config, sequence_length=8192)
    assert asked.make_recipe(4096).sequence_length == 8192  # refused by `retrofit`, with the reason
    tokens = dataclasses.replace(config, tokens=2**22).make_recipe(4096)
    assert tokens.total_tokens(policy) == pytest.approx(2**22, rel=0.02)


def test_presets_make_recipes():
    recipes = {name: config.make_recipe() for name, (_, config) in retrofit.PRESETS.items()}
    assert recipes["qwen3-8b"].pass_size(8) == 8
    assert recipes["llama-3.2-1b"].stages[-1].steps == 9000
    assert recipes["llama-2-7b-dmc"].name == "dmc_paper llama-2-7b"
    changed = dataclasses.replace(
        retrofit.PRESETS["llama-3.2-1b"][1], batch_size=4, learning_rate=1e-3, snapshots=(2.0,)
    ).make_recipe()
    assert {stage.learning_rate for stage in changed.stages} == {1e-3}
    assert {stage.batch_size or changed.batch_size for stage in changed.stages} == {4}
    assert changed.snapshots == (2.0,)
    _, merging = retrofit.PRESETS["llama-2-7b-dmc"]
    flat = dataclasses.replace(merging, learning_rate=1e-4).make_recipe()
    assert {stage.final_learning_rate for stage in flat.stages} == {None}
    row = dataclasses.replace(merging, paper_model="llama-2-7b-dms-paper").make_recipe()
    assert row.stages[0].steps == 2000


@pytest.mark.parametrize(
    ("given", "policy"),
    [
        ({}, dms_jax.DMS(window=512, source="adapter")),
        (dict(recipe="paper"), dms_jax.DMS(window=16, source="query_neuron")),
        (dict(recipe="quickstart"), dms_jax.DMS(window=64, source="adapter")),
        (dict(recipe="dmc_paper"), dms_jax.DMC(neuron="first")),
        (
            dict(recipe="dmc_quickstart"),
            dms_jax.DMC(neuron="first", offset=2.0, temperature=0.3),
        ),
        # Omitted options are those of the recipe.
        (dict(recipe="paper", options=("window=7",)), dms_jax.DMS(window=7)),
        (dict(recipe="paper", options=('{"source": "adapter"}',)), dms_jax.DMS(16, "adapter")),
        # A policy of another kind has the library's defaults.
        (dict(policy="DMC", options=("offset=4.5",)), dms_jax.DMC(offset=4.5)),
        (dict(policy="DMS", recipe="dmc_paper", options=("shift=0",)), dms_jax.DMS(shift=0)),
        (dict(policy="FixedPooling", options=("every=2",)), dms_jax.FixedPooling(every=2)),
    ],
)
def test_policy_defaults_to_the_recipes(given, policy):
    assert dataclasses.replace(CUSTOM, **given).make_policy() == policy


def test_omitted_options_have_library_defaults():
    recipes = dms_jax.recipes
    for name, recipe in {
        "published": recipes.dms_published(),
        "paper": recipes.dms_paper(),
        "quickstart": recipes.dms_quickstart(),
        "dmc_paper": recipes.dmc_paper(),
        "dmc_quickstart": recipes.dmc_quickstart(),
    }.items():
        assert dataclasses.replace(CUSTOM, recipe=name).make_recipe() == recipe
    with pytest.raises(dms_jax.ConfigError, match="--paper-model belongs"):
        dataclasses.replace(CUSTOM, paper_model="qwen-r1-7b").make_recipe()
    assert CUSTOM.seed == inspect.signature(dms_jax.retrofit).parameters["seed"].default


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        (dict(model=""), "ConfigError", "give --model and --data"),
        (dict(data=(pathlib.Path("none.txt"),)), "DataError", "none.txt"),
        (dict(model="./nowhere"), "CheckpointError", "nowhere"),
        (dict(options=("windw=3",)), "ConfigError", "did you mean window?"),
        (
            dict(sequence_shards=2, sequence_length=30, options=("window=8",)),
            "ConfigError",
            "30 tokens cannot be split over 2",
        ),
        (dict(data_shards=4, batch_size=6), "ConfigError", "a batch of 6 does not divide"),
        (dict(sequence_length=100_000), "ConfigError", "do not fit the model's 512 positions"),
        # Sequences capped at the model's positions may be no longer than the window, and few tokens
        # at the recipe's length make no step.
        (dict(recipe="published"), "ConfigError", "window of 512 in sequences of 512 tokens"),
        (dict(recipe="published", tokens=2**17), "ConfigError", "window of 512"),
        (
            dict(options=("window=255",), sequence_length=256),
            "ConfigError",
            "window of 255 in sequences of 256 tokens",
        ),
    ],
)
def test_refused_settings_create_no_files(given, error, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = dataclasses.replace(STORIES, out=tmp_path / "runs" / "one", tensorboard=True, **given)
    with pytest.raises(dms_jax.DmsJaxError) as refused:
        retrofit.main(config)
    assert type(refused.value).__name__ == error
    assert says in str(refused.value)
    assert not [each for each in tmp_path.rglob("*") if each.is_file()]


@pytest.mark.parametrize(
    ("lines", "given", "warns", "read"),
    [
        (
            '{"prompt": "Once", "response": " upon a time"}\noops\n',
            dict(malformed=0.5),
            "1 of 2 lines",
            [Exchange("Once", " upon a time")],
        ),
        (
            '{"q": "1 + 1?", "a": "2"}\n{"q": "long", "a": "too long"}\n',
            dict(prompt="Q: {q}", response="{a}", longest=10),
            "1 of 2 records are left out",
            [Exchange("Q: 1 + 1?", "2")],
        ),
        ('{"q": "1 + 1?"}\n', dict(field="q"), None, ["1 + 1?"]),
    ],
)
def test_data_options(lines, given, warns, read, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(lines)
    config = dataclasses.replace(STORIES, data=(path,), **given)
    with contextlib.nullcontext() if warns is None else pytest.warns(UserWarning, match=warns):
        source = config.make_data()
    assert [source[i] for i in range(len(source))] == read
