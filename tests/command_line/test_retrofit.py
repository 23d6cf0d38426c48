"""`dms-jax retrofit`: its presets, what it writes, and what it says when it cannot."""

import dataclasses
import inspect
import pathlib

import pytest

import dms_jax
from dms_jax import assets
from dms_jax.command_line import retrofit
from dms_jax.data import Exchange
from dms_jax.model.low_rank import LowRank, low_rank_of


def test_errors_name_options_of_the_command():
    text = "another recipe (`batch_size` 4, not 2). Give restart_from=6, or another `out`."
    with pytest.raises(dms_jax.ConfigError) as caught, retrofit.spelled_as_options():
        raise dms_jax.ConfigError(text)
    assert str(caught.value) == (
        "another recipe (--batch-size 4, not 2). Give --restart-from 6, or another --out."
    )
    other = dms_jax.DataError("nothing of these")
    with pytest.raises(dms_jax.DataError) as same, retrofit.spelled_as_options():
        raise other
    assert same.value is other


def test_a_small_run_is_written_and_loads(tmp_path, capsys):
    _, config = retrofit.PRESETS["stories260k"]
    config = dataclasses.replace(
        config, out=tmp_path, compression_ratio=1.2, sequence_length=32, batch_size=2, window=8
    )
    retrofit.main(config)
    assert "3 steps to ratio 1.2" in capsys.readouterr().out
    model = dms_jax.load(tmp_path / "model")
    assert model.policy == dms_jax.DMS(window=8, source="adapter")
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 3


@pytest.mark.nightly
def test_frozen_weights_or_low_rank_updates_leave_an_adapter(tmp_path, capsys):
    _, config = retrofit.PRESETS["stories260k"]
    config = dataclasses.replace(
        config,
        out=tmp_path,
        compression_ratio=1.1,
        sequence_length=32,
        batch_size=2,
        window=8,
        trainable="low_rank",
        rank=2,
        alpha=4.0,
        adapter_only=True,
    )
    retrofit.main(config)
    assert f"The adapter is in {tmp_path / 'model'}" in capsys.readouterr().out
    model = dms_jax.load(assets.path(config.model), adapter=tmp_path / "model")
    assert low_rank_of(model.transformer) == LowRank(2, 4.0)
    assert model.policy == config.make_policy()
    whole = dataclasses.replace(config, trainable="recipe", out=tmp_path / "whole")
    with pytest.raises(dms_jax.ConfigError, match=r"adapter_only .* trains all weights"):
        retrofit.main(whole)


@pytest.mark.parametrize(
    ("options", "policy"),
    [
        (
            dict(policy="DMC", importance="uniform", offset=4.0),
            dms_jax.DMC(importance="uniform", offset=4.0),
        ),
        (dict(policy="DMS", recipe="dmc_paper", shift=0), dms_jax.DMS(shift=0)),
        (dict(policy="DMC", per="layer", merge_window=None), dms_jax.DMC(None, per="layer")),
        (dict(policy="FixedPooling", every=2), dms_jax.FixedPooling(every=2)),
        (dict(window=8, source="query_neuron"), dms_jax.DMS(window=8)),
    ],
)
def test_policies_by_name(options, policy):
    config = retrofit.Config(model="", data=(), out=pathlib.Path("out"))
    assert dataclasses.replace(config, **options).make_policy() == policy


@pytest.mark.parametrize(
    ("recipe", "policy"),
    [
        ("published", dms_jax.DMS(window=512, source="adapter")),
        ("paper", dms_jax.DMS(window=16, source="query_neuron")),
        ("quickstart", dms_jax.DMS(window=64, source="adapter")),
    ],
)
def test_a_recipe_brings_the_policy_it_was_made_for(recipe, policy):
    config = retrofit.Config(model="", data=(), out=pathlib.Path("out"), recipe=recipe)
    assert config.make_policy() == policy
    changed = dataclasses.replace(config, window=7, source="adapter")
    assert changed.make_policy() == dms_jax.DMS(window=7, source="adapter")


def test_a_recipe_of_merging_brings_merging():
    config = retrofit.Config(model="", data=(), out=pathlib.Path("out"), recipe="dmc_paper")
    assert config.make_policy() == dms_jax.DMC(neuron="first")
    quick = dataclasses.replace(config, recipe="dmc_quickstart")
    assert quick.make_policy() == dms_jax.DMC(neuron="first", offset=2.0, temperature=0.3)
    given = dataclasses.replace(quick, policy="DMS", temperature=0.2, recipe="paper")
    assert given.make_policy() == dms_jax.DMS(window=16, temperature=0.2)
    row = dataclasses.replace(config, paper_model="llama-2-7b-dms-paper").make_recipe()
    assert row.stages[0].steps == 2000


def test_a_recipe_is_scaled_down():
    _, config = retrofit.PRESETS["llama-3.2-1b"]
    recipe = dataclasses.replace(config, steps=110).make_recipe()
    assert [stage.steps for stage in recipe.stages] == [20, 90]
    few = dataclasses.replace(config, tokens=11_000 * 4 * 512, sequence_length=512, batch_size=4)
    assert few.make_recipe().total_tokens(config.make_policy()) == 11_000 * 4 * 512
    warm = dataclasses.replace(config, distillation_temperature=2.0).make_recipe()
    assert warm.distillation_temperature == 2.0


def test_a_model_with_fewer_positions_is_trained_on_shorter_sequences():
    """The first line of the help failed on every model of fewer than 32,768 positions."""
    _, config = retrofit.PRESETS["custom"]
    recipe, policy = config.make_recipe(4096), config.make_policy()
    assert recipe.sequence_length == 4096 < config.make_recipe().sequence_length
    assert config.make_recipe(2**20) == config.make_recipe()
    asked = dataclasses.replace(config, sequence_length=8192)
    assert asked.make_recipe(4096).sequence_length == 8192  # refused by `retrofit`, with the reason
    tokens = dataclasses.replace(config, tokens=2**22).make_recipe(4096)
    assert tokens.total_tokens(policy) == pytest.approx(2**22, rel=0.02)


def test_a_window_that_no_token_leaves_is_refused(tmp_path):
    """Sequences that are cut to a model's positions may be no longer than the recipe's window."""
    _, config = retrofit.PRESETS["custom"]
    own = retrofit.PRESETS["stories260k"][1]
    told = dataclasses.replace(config, model=own.model, data=own.data, out=tmp_path / "run")
    with pytest.raises(dms_jax.ConfigError, match=r"window of 512 .* 512 tokens.* --window"):
        retrofit.main(told)
    short = dataclasses.replace(own, window=255, sequence_length=256, out=tmp_path / "run")
    with pytest.raises(dms_jax.ConfigError, match=r"window of 255 .* 256 tokens"):
        retrofit.main(short)
    few = dataclasses.replace(told, tokens=2**17)  # of which the recipe's own length makes no step
    with pytest.raises(dms_jax.ConfigError, match="window of 512"):
        retrofit.main(few)


def test_presets_make_recipes():
    recipes = {name: config.make_recipe() for name, (_, config) in retrofit.PRESETS.items()}
    assert recipes["qwen3-8b"].pass_size(8) == 8
    assert recipes["llama-3.2-1b"].stages[-1].steps == 9000
    assert recipes["llama-2-7b-dmc"].name == "dmc_paper llama-2-7b dmc"
    changed = dataclasses.replace(
        retrofit.PRESETS["llama-3.2-1b"][1], batch_size=4, learning_rate=1e-3, snapshots=(2.0,)
    ).make_recipe()
    assert {stage.learning_rate for stage in changed.stages} == {1e-3}
    assert {stage.batch_size or changed.batch_size for stage in changed.stages} == {4}
    assert changed.snapshots == (2.0,)
    _, merging = retrofit.PRESETS["llama-2-7b-dmc"]
    local = dataclasses.replace(merging, variant="local_prior", learning_rate=1e-4).make_recipe()
    assert local.prior == "layer"
    assert {stage.final_learning_rate for stage in local.stages} == {None}


def test_what_is_missing_is_told(tmp_path):
    _, custom = retrofit.PRESETS["custom"]
    with pytest.raises(dms_jax.ConfigError, match="give --model and --data"):
        retrofit.main(custom)
    missing = dataclasses.replace(
        retrofit.PRESETS["stories260k"][1], data=(tmp_path / "none.txt",), out=tmp_path / "run"
    )
    with pytest.raises(dms_jax.DataError, match=r"none\.txt"):
        retrofit.main(missing)
    unknown = dataclasses.replace(
        missing, data=retrofit.PRESETS["stories260k"][1].data, model=str(tmp_path / "nowhere")
    )
    with pytest.raises(dms_jax.DmsJaxError, match="nowhere"):
        retrofit.main(unknown)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (dict(sequence_shards=2, sequence_length=30, window=8), "30 tokens cannot be split over 2"),
        (dict(data_shards=4, batch_size=6), "a batch of 6 does not divide into passes"),
        (dict(sequence_length=100_000), "do not fit the model's 512 positions"),
    ],
)
def test_refused_settings_leave_nothing_behind(options, says, tmp_path):
    config = dataclasses.replace(
        retrofit.PRESETS["stories260k"][1], out=tmp_path / "runs" / "one", tensorboard=True
    )
    with pytest.raises(dms_jax.ConfigError, match=says):
        retrofit.main(dataclasses.replace(config, **options))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_was_there_stays_when_settings_are_refused(tmp_path):
    config = dataclasses.replace(
        retrofit.PRESETS["stories260k"][1], out=tmp_path / "one", sequence_length=100_000
    )
    config.out.mkdir()
    with pytest.raises(dms_jax.ConfigError, match="512 positions"):
        retrofit.main(config)
    assert list(config.out.iterdir()) == []


def test_malformed_lines_up_to_a_share_and_answers_alone(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "Once", "response": " upon a time"}\noops\n')
    _, config = retrofit.PRESETS["stories260k"]
    config = dataclasses.replace(config, data=(path,), malformed=0.5, answers_only=True)
    assert config.make_recipe().answers_only
    with pytest.warns(UserWarning, match="1 of 2 lines"):
        source = config.make_data()
    assert [source[i] for i in range(len(source))] == [Exchange("Once", " upon a time")]
    assert len(dataclasses.replace(config, malformed=0.0).make_data()) == 2
    texts = tmp_path / "a.txt"
    texts.write_bytes(b"fine<|endoftext|>\xff")
    with pytest.warns(UserWarning, match="1 of 2 lines"):
        source = dataclasses.replace(config, data=(texts,)).make_data()
    assert [source[i] for i in range(len(source))] == ["fine"]


def test_records_are_told_what_they_hold(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"q": "1 + 1?", "a": "2"}\n{"q": "long", "a": "too long"}\n')
    _, config = retrofit.PRESETS["stories260k"]
    config = dataclasses.replace(config, data=(path,), prompt="Q: {q}", response="{a}", longest=10)
    with pytest.warns(UserWarning, match="1 of 2 records are left out"):
        source = config.make_data()
    assert [source[i] for i in range(len(source))] == [Exchange("Q: 1 + 1?", "2")]
    other = dataclasses.replace(config, prompt=None, response=None, longest=None, field="q")
    assert other.make_data()[0] == "1 + 1?"


@pytest.mark.nightly
@pytest.mark.parametrize("shards", [1, 2])
def test_records_for_tensorboard(tmp_path, shards):
    _, config = retrofit.PRESETS["stories260k"]
    config = dataclasses.replace(
        config,
        out=tmp_path,
        compression_ratio=1.2,
        sequence_length=32,
        batch_size=2,
        window=8,
        snapshots=(1.1,),
        tensorboard=True,
        data_shards=shards,
    )
    retrofit.main(config)
    assert list((tmp_path / "tensorboard").glob("events*"))


def test_what_is_not_said_is_as_the_library_has_it():
    _, custom = retrofit.PRESETS["custom"]
    assert custom.make_policy() == dms_jax.DMS(source="adapter")
    for policy in (dms_jax.DMC(), dms_jax.FixedPooling()):
        assert dataclasses.replace(custom, policy=policy.name).make_policy() == policy
    recipes = dms_jax.recipes
    assert custom.make_recipe() == recipes.dms_published()
    for name, recipe in {
        "paper": recipes.dms_paper(),
        "quickstart": recipes.dms_quickstart(),
        "dmc_paper": recipes.dmc_paper(),
        "dmc_quickstart": recipes.dmc_quickstart(),
    }.items():
        assert dataclasses.replace(custom, recipe=name).make_recipe() == recipe
    with pytest.raises(dms_jax.ConfigError, match="--paper-model belongs"):
        dataclasses.replace(custom, paper_model="qwen-r1-7b").make_recipe()
    library = inspect.signature(dms_jax.retrofit).parameters
    for name in ("checkpoint_every", "seed"):
        assert getattr(custom, name) == library[name].default
