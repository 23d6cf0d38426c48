"""Low-rank updates beside the weights: zero at the start, and equal when merged."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dms_jax import sharding
from dms_jax.checks import check
from dms_jax.errors import ConfigError
from dms_jax.model import low_rank
from dms_jax.model.language_model import LanguageModel
from dms_jax.model.low_rank import LowRank
from dms_jax.policies import TOVA, Vanilla
from dms_jax.training.parameters import parameters
from tests.support.models import random_model, random_tokens, tiny_config

SIZE = LowRank(rank=3, alpha=6.0)
TOKENS = random_tokens(0, 2, 10)


def drawn(model, size=SIZE, seed=0):
    """Factors of which none is zero."""
    random = np.random.default_rng(seed)
    return {
        path: jnp.asarray(random.normal(size=param.get_value().shape) / 4, param.get_value().dtype)
        for path, param in low_rank.factor_parameters(model, size).items()
    }


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_new_updates_leave_the_base_bit_for_bit(dtype):
    base = random_model(tiny_config(biases=True), dtype=dtype)
    factors = low_rank.initial_factors(base, SIZE, jax.random.key(0))
    model = low_rank.add_factors(base, SIZE, factors)
    chex.assert_type(list(factors.values()), jnp.float32)
    run = jax.jit(lambda model: model(jnp.asarray(TOKENS), Vanilla()).hidden)
    chex.assert_trees_all_equal(run(model), run(base))
    before, after = parameters(base), parameters(model)
    assert all(after[name] is before[name] for name in before)
    for name in after.keys() - before.keys():
        assert np.any(after[name]) == name.endswith("lora_a")
    assert len(after) == len(before) + 8
    a = after["layers.attention.qkv_proj.q.lora_a"]
    chex.assert_shape(a, (2, 16, 3))
    assert 0.2 < np.abs(a).max() <= 1 / 4  # 1 / sqrt(16)
    # The factors of two projections are different draws.
    assert np.any(a != after["layers.attention.qkv_proj.k.lora_a"])


@pytest.mark.nightly
@pytest.mark.parametrize("qk_norm", [False, True])
def test_merged_updates_are_the_same_function(qk_norm):
    with jax.enable_x64(True):
        base = random_model(tiny_config(qk_norm=qk_norm, biases=not qk_norm, tied=False))
        model = low_rank.add_factors(base, SIZE, drawn(base))
        merged = low_rank.merge(model)
        assert low_rank.low_rank_of(model) == SIZE
        assert low_rank.low_rank_of(merged) is None
        for policy in (Vanilla(), TOVA(budget=4)):
            logits = [
                np.asarray(LanguageModel(transformer=each).logits(TOKENS, policy=policy))
                for each in (base, model, merged)
            ]
            chex.assert_trees_all_close(logits[2], logits[1], rtol=1e-10, atol=1e-10)
            assert np.abs(logits[1] - logits[0]).max() > 1e-2


def test_factors_are_dropped_and_replaced():
    base = random_model(tiny_config(), adapter=True, dtype=jnp.float32)
    model = low_rank.add_factors(base, SIZE, drawn(base))
    assert low_rank.drop_factors(base) is base
    assert low_rank.merge(base) is base
    dropped = parameters(low_rank.drop_factors(model))
    assert dropped.keys() == parameters(base).keys()
    assert all(array is parameters(base)[name] for name, array in dropped.items())
    other = LowRank(rank=2, alpha=1.0)
    again = low_rank.add_factors(model, other, drawn(model, other))
    assert low_rank.low_rank_of(again) == other
    assert parameters(again)["layers.attention.o_proj.o.lora_a"].shape[-1] == 2


@pytest.mark.parametrize("rules", [sharding.TRAINING_RULES, sharding.DECODING_RULES])
def test_factors_are_sharded_with_their_projection(rules):
    mesh = sharding.make_mesh(2, 4)
    model = random_model(tiny_config(num_heads=8, num_kv_heads=4), dtype=jnp.float32)
    specs = {
        "/".join(path[-3:]): tuple(
            sharding.parameter_sharding(
                mesh, param.get_metadata("axes"), param.get_value().shape, rules
            ).spec
        )
        for path, param in low_rank.factor_parameters(model, SIZE).items()
    }
    embed = "data" if rules is sharding.TRAINING_RULES else None
    assert specs["qkv_proj/q/lora_a"] == (None, embed, None)
    assert specs["qkv_proj/v/lora_b"] == (None, None, "model", None, None)
    assert specs["o_proj/o/lora_a"] == (None, "model", None, None)
    assert specs["o_proj/o/lora_b"] == (None, None, embed)


def test_sizes_are_checked():
    for fields in (dict(rank=0), dict(alpha=0), dict(alpha=-1.0)):
        with pytest.raises(ConfigError, match="LowRank"):
            LowRank(**fields)
    assert check("low_rank", SIZE, LowRank) is SIZE
