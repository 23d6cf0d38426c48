"""The ratios that are drawn at each export are those of the decisions, on one device or many."""

import dataclasses

import chex
import jax
import numpy as np
import pytest

from dms_jax.analysis.retention import NEVER, retention
from dms_jax.command_line.ratio_pictures import head_ratios
from dms_jax.model.language_model import LanguageModel
from dms_jax.sharding import TRAINING_RULES, make_mesh
from dms_jax.training.parameters import parameters, rebuilder, shardings
from tests.support.models import random_model, tiny_config
from tests.training.tiny import EAGER

POLICY = dataclasses.replace(EAGER, window=1, shift=0)
LENGTH, AFTER = 12, 2  # tokens whose decisions count, and those that let them leave the window


def split(model, mesh):
    """The model split over the devices as training leaves it."""
    places = shardings(model.transformer, mesh, TRAINING_RULES)
    arrays = {n: jax.device_put(x, places[n]) for n, x in parameters(model.transformer).items()}
    return dataclasses.replace(model, transformer=rebuilder(model.transformer)(arrays), mesh=mesh)


@pytest.mark.parametrize(
    "sizes", [None, pytest.param((2, 2, 2), marks=pytest.mark.nightly)], ids=["one device", "mesh"]
)
def test_they_are_of_what_leaves_the_cache(sizes):
    model = LanguageModel(
        random_model(tiny_config(), adapter=True, dtype=np.float32), policy=POLICY
    )
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, (4, LENGTH + AFTER))
    gone = retention(model, tokens).gone[..., :LENGTH] < NEVER
    expected = 1 / (1 - gone.mean((1, 3)))
    assert len(np.unique(expected)) > 2
    if sizes is not None:
        data, sequence, shards = sizes
        model = split(model, make_mesh(data, shards, sequence=sequence))
    chex.assert_trees_all_close(head_ratios(model, tokens[:, :LENGTH]), expected, rtol=1e-5)
