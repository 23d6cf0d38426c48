"""What `retrofit` takes when no recipe is given, and what it says when there is no data."""

import dataclasses

import pytest

import dms_jax
from dms_jax.errors import ConfigError, DataError
from dms_jax.training import api, recipes


@pytest.mark.parametrize(
    ("policy", "name"),
    [
        (dms_jax.DMS(source="adapter"), "dms_published"),
        (dms_jax.DMS(), "dms_published"),
        (dms_jax.DMC(), recipes.dmc_paper().name),
        (dms_jax.KVzap(), "kvzap"),
        (dms_jax.KVpop(), "kvpop"),
    ],
    ids=repr,
)
def test_a_recipe_is_recommended_for_every_policy_that_is_learned(policy, name):
    found = recipes.recommended(policy, positions=512)
    assert found.name == name
    assert found.sequence_length == 512
    assert recipes.recommended(policy, positions=2**20).sequence_length >= 2048


def test_no_recipe_is_recommended_for_others():
    with pytest.raises(ConfigError, match=r"No recipe was made for FixedPooling.*give recipe="):
        recipes.recommended(dms_jax.FixedPooling(), positions=512)


def test_retrofit_takes_it(monkeypatch):
    model = dms_jax.load(dms_jax.assets.path("stories260k"))
    asked = []
    monkeypatch.setattr(api, "train", lambda model, **options: asked.append(options) or model)
    dms_jax.retrofit(model, "KVzap", data=["Once"])
    wanted = dataclasses.replace(recipes.kvzap(), sequence_length=512)
    assert asked == [{"policy": dms_jax.KVzap(), "recipe": wanted, "data": ["Once"], "out": None}]
    with pytest.raises(DataError, match="retrofit learns from data=: texts"):
        dms_jax.retrofit(model, dms_jax.DMS())
