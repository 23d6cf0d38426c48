"""The shipped model against its card, and the shipped texts."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dms_jax import assets
from dms_jax.checkpoint import load
from dms_jax.errors import CheckpointError, DataError
from dms_jax.policies import DMS, Vanilla

# Greedy text of stories260K as its card gives it.
OPENING = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. "
    "One day, she saw a big, red ball. She wanted to play with it, but it was too high."
)


@pytest.fixture(scope="module")
def model():
    return load(assets.path("stories260k"))


@jax.jit
def last_logits(transformer, tokens):
    return transformer.unembed(transformer(tokens, Vanilla()).hidden)


def test_greedy_text(model):
    length = 80
    tokens = np.zeros((1, length), np.int32)
    tokens[0, 0] = model.tokenizer.bos_token_id
    for position in range(1, length):
        logits = last_logits(model.transformer, tokens)
        tokens[0, position] = int(jnp.argmax(logits[0, position - 1]))
    assert model.tokenizer.decode(tokens[0]).startswith(OPENING)


def test_stories_are_enough_and_disjoint(model):
    train, valid = assets.stories("train"), assets.stories("valid")
    assert sum(len(model.tokenizer.encode(story)) for story in valid) >= 103_000
    assert sum(len(story) for story in train) > 950_000

    def plain(stories):
        return [" ".join(story.split()).lower() for story in stories]

    assert len(set(plain(train))) == len(train)
    assert len(set(plain(valid))) == len(valid)
    assert not set(plain(train)) & set(plain(valid))


def test_every_asset_carries_its_licence():
    for name in ("stories260k", "tinystories"):
        assert (assets.path(name) / "LICENSE").stat().st_size > 1000
        assert "icence" in (assets.path(name) / "README.md").read_text()
    for name in ("books", "reasoner-11m", "reasoner-11m-dms"):  # public domain, and our own
        assert "**Licence:**" in (assets.path(name) / "README.md").read_text()


def test_adapter_fits_its_base_and_is_refused_alone():
    adapter = assets.path("reasoner-11m-dms")
    model = load(assets.path("reasoner-11m"), adapter=adapter)
    assert model.policy == DMS(window=16, source="adapter", shift=0)
    said = "trained on (dms_jax.assets.path('reasoner-11m')), with this directory as `adapter`"
    with pytest.raises(CheckpointError, match=re.escape(said)):
        load(adapter)


def test_unknown_asset_is_refused():
    with pytest.raises(
        DataError, match="there are books, reasoner-11m, reasoner-11m-dms, smollm2-135m-"
    ):
        assets.path("gpt5")
    with pytest.raises(DataError, match="train, more and valid"):
        assets.stories("test")
