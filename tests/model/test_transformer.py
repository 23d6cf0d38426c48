"""The transformer over whole sequences: against NumPy, packed, recomputed, replayed."""

import dataclasses
import functools
from typing import get_args

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dms_jax.model.rematerialisation import Remat
from dms_jax.policies import (
    DMC,
    DMS,
    FixedPooling,
    RandomEviction,
    StreamingLLM,
    Vanilla,
)
from tests.oracles import transformer, vanilla
from tests.support.instances import nightly_but
from tests.support.models import oracle_weights, random_model, random_tokens, tiny_config

PARALLEL = [
    Vanilla(),
    DMS(window=2, shift=2),
    DMS(window=1, source="adapter"),
    DMC(offset=0.2),
    DMC(offset=0.2, window=None, per="layer"),
    FixedPooling(every=3),
    StreamingLLM(budget=5, sinks=2),
    RandomEviction(window=2, rate=0.6),
]


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


@functools.cache
def model():
    return random_model(tiny_config(), adapter=True)


@functools.partial(jax.jit, static_argnames=("policy", "remat"))
def run(model, tokens, policy, **options):
    return model(tokens, policy, **options)


@pytest.mark.parametrize(
    "switches",
    [
        dict(qk_norm=False),
        dict(qk_norm=True, tied=False),
        dict(qk_norm=False, biases=True, tied=False),
        dict(num_heads=6, num_kv_heads=3, num_layers=1),
        dict(num_heads=1, num_kv_heads=1),
    ],
    ids=str,
)
def test_logits_equal_the_numpy_transformer(switches):
    model = random_model(tiny_config(**switches), seed=4)
    tokens = random_tokens(1, 2, 17)
    logits = np.asarray(model.unembed(run(model, tokens, Vanilla()).hidden))
    for row in range(2):
        want = transformer.run(
            oracle_weights(model), tokens[row], lambda layer: vanilla.simulate(*layer.rotated)
        )
        assert np.abs(logits[row] - want.logits).max() < 1e-10
    assert logits.std() > 0.3


@pytest.mark.parametrize("policy", nightly_but(PARALLEL[:4], PARALLEL), ids=repr)
def test_packed_documents_are_independent(policy):
    """Positions restart, and attention and decisions do not cross documents."""
    lengths = (9, 1, 7, 5)
    documents = [random_tokens(20 + index, length) for index, length in enumerate(lengths)]
    packed = np.concatenate(documents)[None]
    segments = np.repeat(np.arange(1, 5), lengths)[None].astype(np.int32)
    got = run(model(), packed, policy, segment_ids=segments)
    ends = np.cumsum(lengths)
    width = max(lengths)
    alone = run(model(), np.stack([np.pad(d, (0, width - len(d))) for d in documents]), policy)
    for index, (end, length) in enumerate(zip(ends, lengths, strict=True)):
        part = slice(end - length, end)
        difference = np.asarray(got.hidden[0, part] - alone.hidden[index, :length])
        assert np.abs(difference).max() < 1e-12
        chex.assert_trees_all_equal(
            got.decisions[:, 0, :, part], alone.decisions[:, index, :, :length]
        )


@pytest.mark.nightly
def test_recomputing_layers_changes_no_gradient():
    tokens = random_tokens(3, 2, 11)

    def loss(model, remat):
        return jnp.square(
            run(model, tokens, DMS(window=2, source="adapter"), remat=remat).hidden
        ).mean()

    plain, *others = (
        jax.jit(jax.grad(loss, allow_int=True), static_argnums=1)(model(), remat)
        for remat in get_args(Remat)
    )
    for again in others:
        chex.assert_trees_all_close(plain, again, rtol=1e-7, atol=1e-12)
    assert float(jnp.abs(plain.embedding[...]).max()) > 1e-6


@pytest.mark.nightly
def test_recorded_decisions_can_be_replayed():
    tokens, policy = random_tokens(5, 2, 19), DMS(window=2, source="adapter")
    own = run(model(), tokens, policy)
    marks = np.asarray(own.decisions, bool)
    chex.assert_trees_all_equal(run(model(), tokens, policy, marks=marks).hidden, own.hidden)
    other = run(model(), tokens, policy, marks=~marks)
    chex.assert_trees_all_equal(other.decisions, ~marks)
    assert float(jnp.abs(other.hidden - own.hidden).max()) > 1e-3
    kept = run(model(), tokens, policy, marks=np.zeros_like(marks))
    plain = run(model(), tokens, Vanilla())
    chex.assert_trees_all_close(kept.hidden, plain.hidden, rtol=1e-7, atol=1e-12)


def test_logits_accumulate_in_float32():
    small = random_model(tiny_config(), dtype=jnp.bfloat16)
    passed = run(small, random_tokens(1, 1, 5), Vanilla())
    chex.assert_type(passed.hidden, jnp.bfloat16)
    chex.assert_type(small.unembed(passed.hidden), jnp.float32)


@pytest.mark.parametrize(
    ("changes", "planes"),
    [
        (dict(), [3]),
        (dict(max_position_embeddings=512), []),
        (dict(layer_types=("unrotated",)), [0, 1, 2, 3]),
        (dict(sinks=True), None),
        (dict(attention_soft_cap=20.0), None),
        (dict(qk_norm=True), None),
        (dict(qkv_bias=False), None),
    ],
)
def test_key_centers_of_slow_planes(changes, planes):
    """None where a constant would change attention, or is not what keys have in common."""
    config = tiny_config(qk_norm=False, biases=True)
    config = dataclasses.replace(config, **(dict(max_position_embeddings=31) | changes))
    centers = random_model(config).key_centers()
    if planes is None:
        assert centers is None
        return
    assert centers is not None
    centered = np.abs(np.asarray(centers)).max((0, 1)).reshape(2, 4) > 0
    chex.assert_trees_all_equal(centered, np.isin(np.arange(4), planes)[None].repeat(2, 0))
