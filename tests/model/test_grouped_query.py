"""Grouped-query conversion: pooled heads against NumPy, checkpoints, policies on top, refusals."""

import inspect
import pathlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dms_jax
from dms_jax import assets
from dms_jax.checkpoint import load, save
from dms_jax.errors import ConfigError
from dms_jax.model.grouped_query import to_grouped_query
from dms_jax.model.language_model import LanguageModel
from dms_jax.policies import DMS
from tests.oracles import transformer as oracle
from tests.oracles import vanilla
from tests.support.models import oracle_weights, random_model, random_tokens, tiny_config

TOKENS = random_tokens(5, 11)
FAMILIES = pathlib.Path(__file__).parents[1] / "golden" / "families"


def pooled(linear: oracle.Linear, num_kv_heads: int) -> oracle.Linear:
    """Averages neighbouring heads of [E, K, D], one group at a time, into [E, K', D]."""

    def pool(array):
        joined = array.shape[-2] // num_kv_heads
        heads = [
            np.mean([array[..., head * joined + i, :] for i in range(joined)], axis=0)
            for head in range(num_kv_heads)
        ]
        return np.stack(heads, axis=-2)

    return oracle.Linear(pool(linear.kernel), None if linear.bias is None else pool(linear.bias))


@pytest.mark.parametrize("switches", [{}, {"qk_norm": False, "biases": True, "tied": False}])
@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_converted_model_has_averaged_heads(num_kv_heads, switches):
    with jax.enable_x64(True):
        config = tiny_config(num_heads=8, num_kv_heads=4, **switches)
        model = LanguageModel(random_model(config))
        weights = oracle_weights(model.transformer)
        for layer in weights.layers:
            layer.k, layer.v = (pooled(x, num_kv_heads) for x in (layer.k, layer.v))
        want = oracle.run(weights, TOKENS, lambda layer: vanilla.simulate(*layer.rotated))
        converted = to_grouped_query(model, num_kv_heads)
        assert converted.config.num_kv_heads == num_kv_heads
        assert converted.config.num_heads == 8
        chex.assert_trees_all_close(
            converted.logits(TOKENS[None])[0], want.logits, rtol=1e-7, atol=1e-10
        )
        assert model.config.num_kv_heads == 4  # the original is unchanged
        assert model.transformer.layers.attention.qkv_proj.kernel.shape[2] == 4


def test_converted_model_saves_and_loads(tmp_path):
    model = load(assets.path("stories260k"))
    converted = to_grouped_query(model, 2)
    save(converted, converted.policy, tmp_path / "gqa")
    again = load(tmp_path / "gqa")
    assert again.config == converted.config
    assert again.dtype == model.dtype
    tokens = np.asarray(model.tokenizer.encode("Once upon a time"))[None]
    chex.assert_trees_all_equal(again.logits(tokens), converted.logits(tokens))


@pytest.mark.parametrize("num_kv_heads", [0, 3, 4, 8, 2.0, True])
def test_counts_that_do_not_divide_are_refused(num_kv_heads):
    model = LanguageModel(random_model(tiny_config(num_heads=8, num_kv_heads=4), dtype=jnp.float32))
    with pytest.raises(ConfigError, match="1 or 2"):
        inspect.unwrap(to_grouped_query)(model, num_kv_heads)


def test_model_with_decisions_is_refused():
    config = tiny_config(num_heads=8, num_kv_heads=4)
    for model in (
        LanguageModel(random_model(config, dtype=jnp.float32), policy=DMS()),
        LanguageModel(random_model(config, adapter=True, dtype=jnp.float32)),
    ):
        with pytest.raises(ConfigError, match="Convert the original first"):
            to_grouped_query(model, 2)
    with pytest.raises(ConfigError, match=r"dms_jax\.load"):
        inspect.unwrap(to_grouped_query)("model", 2)


def test_averaging_equal_heads_changes_nothing():
    """Also for a model with sinks, which belong to query heads, and with windows."""
    model = load(FAMILIES / "gpt_oss")
    projection = model.transformer.layers.attention.qkv_proj
    for param, axis in ((projection.kernel, 2), (projection.bias, 1)):  # [L, E, K, G + 2, D]
        value = np.array(param[...])
        heads = np.moveaxis(value, axis, 0)
        heads[1, ..., -2:, :] = heads[0, ..., -2:, :]
        param.set_value(jnp.asarray(value))
    before, after = (np.asarray(each.logits(TOKENS[None])) for each in (model, halved(model)))
    chex.assert_trees_all_close(after, before, rtol=0, atol=1e-4)


def halved(model):
    return to_grouped_query(model, model.config.num_kv_heads // 2)


def test_norms_over_all_heads_are_refused():
    with pytest.raises(ConfigError, match="norms the keys of all KV heads together"):
        halved(load(FAMILIES / "olmo2"))


def test_a_converted_model_stays_on_its_mesh():
    config = tiny_config(num_heads=8, num_kv_heads=8)
    model = LanguageModel(random_model(config, dtype=jnp.float32))
    mesh = dms_jax.make_mesh(2, 4)
    spread = LanguageModel(jax.device_put(model.transformer, jax.devices()[0]), mesh=mesh)
    converted = to_grouped_query(spread, 4)
    kernel = converted.transformer.layers.attention.qkv_proj.kernel[...]
    assert len(kernel.sharding.device_set) == 8
    assert not kernel.is_fully_replicated
    want = to_grouped_query(model, 4).transformer.layers.attention.qkv_proj.kernel[...]
    chex.assert_trees_all_equal(np.asarray(kernel), np.asarray(want))
