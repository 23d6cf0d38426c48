"""Parameter names, the added adapter, the zeroed neuron."""

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from dms_jax.policies import DMC, Vanilla
from dms_jax.training.parameters import (
    add_adapter,
    cast,
    parameters,
    rebuilder,
    zero_borrowed_neurons,
)
from tests.support.models import random_model, random_tokens, tiny_config
from tests.training.tiny import ADAPTER, NEURON


def test_rebuilt_model_is_the_same_function():
    model = random_model(tiny_config(tied=False, biases=True), dtype=jnp.float32)
    again = rebuilder(model)(parameters(model))
    tokens = jnp.asarray(random_tokens(0, 2, 6))
    hidden = model(tokens, Vanilla()).hidden
    chex.assert_tree_all_finite(hidden)
    chex.assert_trees_all_equal(again(tokens, Vanilla()).hidden, hidden)


def test_new_adapter_evicts_nothing_and_shares_weights():
    model = random_model(tiny_config(biases=True), dtype=jnp.bfloat16)
    grafted = add_adapter(model)
    before, after = parameters(model), parameters(grafted)
    added = after.keys() - before.keys()
    assert added == {
        "layers.adapter.norm.scale",
        "layers.adapter.proj.kernel",
        "layers.adapter.proj.bias",
    }
    assert all(after[name] is before[name] for name in before)
    chex.assert_type([after[name] for name in added], jnp.float32)
    assert not model.has_adapter
    tokens = jnp.asarray(random_tokens(0, 2, 8))
    result = grafted(tokens, ADAPTER)
    assert not np.any(result.decisions)
    chex.assert_tree_all_finite(result.hidden)
    chex.assert_trees_all_equal(result.hidden, model(tokens, Vanilla()).hidden)
    assert add_adapter(grafted) is grafted


@pytest.mark.nightly
@pytest.mark.parametrize("qk_norm", [False, True])
def test_a_zeroed_neuron_starts_every_logit_at_the_offset(qk_norm):
    model = random_model(tiny_config(qk_norm=qk_norm, biases=not qk_norm), dtype=jnp.float32)
    tokens = jnp.asarray(random_tokens(0, 2, 16))
    assert np.any(model(tokens, NEURON).decisions)
    before = parameters(model)
    zeroed = zero_borrowed_neurons(before, NEURON, ())
    assert not np.any(rebuilder(model)(zeroed)(tokens, NEURON).decisions)
    changed = {name for name in before if zeroed[name] is not before[name]}
    bias = set() if qk_norm else {"layers.attention.qkv_proj.bias"}
    assert changed == {"layers.attention.qkv_proj.kernel"} | bias
    # [L, E, K, G + 2, D]: only the first query head of each group, dimension 7.
    kernel = "layers.attention.qkv_proj.kernel"
    difference = np.asarray(zeroed[kernel] != before[kernel])
    assert difference[..., 0, 7].all()
    assert difference.sum() == difference[..., 0, 7].size


@pytest.mark.nightly
@pytest.mark.parametrize("neuron", ["last", "first"])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_dmc_borrows_from_queries_and_keys(qk_norm, neuron):
    model = random_model(tiny_config(qk_norm=qk_norm, biases=not qk_norm), dtype=jnp.float32)
    policy = DMC(neuron=neuron)
    before = parameters(model)
    zeroed = zero_borrowed_neurons(before, policy, ())
    # [L, E, K, G + 2, D]: every query head and the key, not the value; only one dimension.
    index = {"first": 0, "last": 7}[neuron]
    for name in ("layers.attention.qkv_proj.kernel", "layers.attention.qkv_proj.bias"):
        if name in before:
            want = np.array(before[name])
            want[..., :-1, index] = 0
            chex.assert_trees_all_equal(zeroed[name], want)
    tokens = jnp.asarray(random_tokens(0, 2, 16))
    eager = DMC(neuron=neuron, offset=-1e-3)  # a neuron of zero merges
    marks = rebuilder(model)(zeroed)(tokens, eager).decisions
    assert np.all(marks[..., 1:] == 1)
    assert not np.any(rebuilder(model)(zeroed)(tokens, policy).decisions)


def test_windowed_layers_lend_no_neuron():
    config = tiny_config(num_layers=3, layer_types=("sliding", "full"), window=4)
    before = parameters(random_model(config, dtype=jnp.float32))
    zeroed = zero_borrowed_neurons(before, NEURON, config.windowed)
    kernel = "layers.attention.qkv_proj.kernel"
    difference = np.asarray(zeroed[kernel] != before[kernel])  # [L, E, K, G + 2, D]
    assert difference[1, ..., 0, 7].all()
    assert not difference[[0, 2]].any()


def test_without_borrowed_neuron_nothing_is_zeroed():
    before = parameters(random_model(tiny_config(), dtype=jnp.float32))
    zeroed = zero_borrowed_neurons(before, ADAPTER, ())
    chex.assert_tree_all_finite(before)
    chex.assert_trees_all_equal(zeroed, before)


def test_adapter_stays_float32_in_passes():
    """The adapter's logits are compared with a threshold."""
    arrays = parameters(random_model(tiny_config(), adapter=True, dtype=jnp.float32))
    narrow = cast(arrays, jnp.bfloat16)
    for name, array in arrays.items():
        adapter = "adapter" in name
        dtype = jnp.float32 if adapter else jnp.bfloat16
        chex.assert_type(narrow[name], dtype, custom_message=name)
        if adapter:
            assert narrow[name] is array
    assert any("adapter" in name for name in arrays)
    assert cast(arrays, None) is arrays
