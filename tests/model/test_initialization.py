"""Random models: the spread of their parameters, and the gradient of the embedding."""

import dataclasses
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dms_jax
from dms_jax import assets
from dms_jax.model import layers
from dms_jax.training.parameters import parameters
from tests.support.models import tiny_config

CONFIG = dms_jax.ModelConfig(
    vocab_size=300,
    hidden_size=64,
    intermediate_size=96,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    max_position_embeddings=64,
    tie_embeddings=True,
)


@pytest.mark.nightly
def test_parameters_spread_as_documented():
    arrays = parameters(dms_jax.initialize(CONFIG, seed=3).transformer)
    expected = {
        "embedding": 0.02,
        "layers.attention.qkv_proj.kernel": 1 / math.sqrt(64),
        "layers.attention.o_proj.kernel": 1 / math.sqrt(4 * 32) / math.sqrt(2 * 3),
        "layers.mlp.gate_up_proj.kernel": 1 / math.sqrt(64),
        "layers.mlp.down_proj.kernel": 1 / math.sqrt(96) / math.sqrt(2 * 3),
    }
    for name, deviation in expected.items():
        assert arrays[name].std() == pytest.approx(deviation, rel=0.03), name
        assert abs(arrays[name].mean()) < 0.03 * deviation, name
        chex.assert_type(arrays[name], jnp.float32)
    scales = [array for name, array in arrays.items() if name not in expected]
    assert len(scales) == 3
    assert all(bool((scale == 1).all()) for scale in scales)


@pytest.mark.nightly
def test_a_seed_gives_the_same_model():
    one, same, other = (
        parameters(dms_jax.initialize(tiny_config(), seed=seed, dtype="bfloat16").transformer)
        for seed in (0, 0, 1)
    )
    chex.assert_type(list(one.values()), jnp.bfloat16)
    chex.assert_tree_all_finite(one)
    chex.assert_trees_all_equal(one, same)
    assert (one["embedding"] != other["embedding"]).any()


@pytest.mark.nightly
def test_tokenizer_sets_end_tokens():
    tokenizer = dms_jax.load(assets.path("stories260k")).tokenizer
    config = tiny_config()
    with pytest.raises(dms_jax.ConfigError, match="tokenizer has 512 tokens and the model only 31"):
        dms_jax.initialize(config, tokenizer=tokenizer)
    larger = dataclasses.replace(CONFIG, vocab_size=512)
    model = dms_jax.initialize(larger, tokenizer=tokenizer)
    assert model.generation.eos_token_ids == (tokenizer.eos_token_id,)
    assert model.generation.bos_token_id == tokenizer.bos_token_id
    assert model.tokenizer is tokenizer
    assert model.policy == dms_jax.Vanilla()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(seed=-1), "seed must be a whole number"),
        (dict(dtype="int32"), "parameters cannot have dtype int32"),
        (dict(dtype="float33"), "dtype 'float33' is not known"),
    ],
)
def test_invalid_seeds_and_dtypes_are_refused(options, message):
    with pytest.raises(dms_jax.ConfigError, match=message):
        dms_jax.initialize(tiny_config(), **options)


def gradient_of_table(table, tokens, weights):
    def total(table):
        return jnp.sum(
            (layers.look_up(table, tokens, table.shape[1]) * weights).astype(jnp.float32)
        )

    return jax.grad(total)(table)


@pytest.mark.parametrize("alive", [2**28, 3 * 17 * 4])  # at once, and in chunks with padding
@pytest.mark.parametrize("block", [None, 8, 64])  # in blocks, as on GPUs
def test_the_gradient_of_a_look_up_adds_up_the_rows(alive, block, monkeypatch):
    monkeypatch.setattr(layers, "_ONE_HOT_ELEMENTS", alive)
    if block is not None:
        monkeypatch.setattr(layers, "_BLOCK", block)
        monkeypatch.setattr(layers, "_sum_by_product", layers._sum_by_blocks)
    random = np.random.default_rng(0)
    tokens, weights = random.integers(0, 17, (3, 11)), random.normal(size=(3, 11, 5))
    expected = np.zeros((17, 5))
    np.add.at(expected, tokens, weights)
    with jax.enable_x64(True):
        table = jnp.asarray(random.normal(size=(17, 5)))
        found = gradient_of_table(table, jnp.asarray(tokens), jnp.asarray(weights))
    chex.assert_trees_all_close(found, expected, rtol=1e-12)


@pytest.mark.parametrize("form", ["product", "blocks"])
def test_frequent_token_gradient_in_bfloat16(form, monkeypatch):
    """In bfloat16 a sum of ones stops growing at 256."""
    monkeypatch.setattr(layers, "_sum_by_product", getattr(layers, f"_sum_by_{form}"))
    table = jnp.zeros((4, 2), jnp.bfloat16)
    tokens = jnp.zeros((8, 512), jnp.int32)
    found = gradient_of_table(table, tokens, jnp.ones((8, 512, 2), jnp.bfloat16))
    chex.assert_type(found, jnp.bfloat16)
    chex.assert_trees_all_equal(found, np.array([[4096, 4096], [0, 0], [0, 0], [0, 0]]))
