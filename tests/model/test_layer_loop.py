"""The layer loop: for any number of layers per turn, each layer gets its own arrays."""

import chex
import jax
import jax.numpy as jnp
import pytest

from dms_jax.errors import ConfigError
from dms_jax.model.layer_loop import (
    ByCache,
    Role,
    Stretch,
    check_layers,
    roles,
    scan_layers,
    stretches,
)
from dms_jax.policies import DMS, KCache, Quest, Vanilla
from dms_jax.policies.base import LayerGroup
from tests.support.models import tiny_config

LAYERS = 6
KEY = jax.random.key(0)
PARAMETERS = {
    "matrix": jax.random.normal(KEY, (LAYERS, 3, 3)),
    "vector": jax.random.normal(KEY, (LAYERS, 3)),
}
OWN = {"numbers": jnp.arange(2 * LAYERS).reshape(LAYERS, 2), "none": None}
OWN |= {"empty": jnp.zeros((LAYERS, 2, 0))}  # like DMC's sums with a window of 1


def body(x, layer, index, role, own):
    x = jnp.tanh(x @ layer["matrix"]) * layer["vector"]
    return x, {
        "index": index,
        "start": role.group.start,
        "sum": own["numbers"].sum(),
        "none": None,
        "empty": own["empty"],
    }


def of_groups(*ends):
    (kind,) = tiny_config().kinds
    return [
        Stretch(start, (Role(LayerGroup(start, end, Vanilla()), kind),), end - start)
        for start, end in zip((0, *ends), ends, strict=False)
    ]


@pytest.mark.parametrize("block", [1, 2, 4, 8])
@pytest.mark.parametrize("ends", [(6,), (2, 6), (1, 3, 6)])
def test_layers_in_turns_of_any_length(ends, block):
    x = jnp.ones(3)
    got, results = jax.jit(
        lambda x: scan_layers(body, x, PARAMETERS, of_groups(*ends), OWN, block=block)
    )(x)
    for layer in range(LAYERS):
        x = jnp.tanh(x @ PARAMETERS["matrix"][layer]) * PARAMETERS["vector"][layer]
    chex.assert_trees_all_close(got, x, atol=1e-6)
    assert results["index"].tolist() == list(range(LAYERS))
    assert results["sum"].tolist() == [4 * layer + 1 for layer in range(LAYERS)]
    starts = [max(s for s in (0, *ends) if s <= layer) for layer in range(LAYERS)]
    assert results["start"].tolist() == starts
    assert results["none"] is None
    assert results["empty"].shape == (LAYERS, 2, 0)


def windows(num_layers, *layer_types):
    return tiny_config(num_layers=num_layers, layer_types=layer_types, window=5)


def starts_and_turns(config, policy):
    found = stretches(roles(config, policy), len(config.kinds))
    return [(each.start, len(each.group), each.turns) for each in found]


def test_loop_runs_over_shortest_group():
    gemma = windows(26, *["sliding"] * 5, "full")
    assert starts_and_turns(gemma, Vanilla()) == [(0, 6, 4), (24, 2, 1)]
    assert starts_and_turns(windows(36, "sliding", "full"), Vanilla()) == [(0, 2, 18)]
    assert starts_and_turns(tiny_config(num_layers=36), Vanilla()) == [(0, 1, 36)]
    every_fourth = tiny_config(num_layers=36, layer_types=("full",) * 3 + ("unrotated",))
    assert starts_and_turns(every_fourth, Vanilla()) == [(0, 4, 9)]


def test_first_layers_are_the_first_without_window():
    """Quest's first two layers are those at 2 and 5: the others keep a window."""
    config = windows(13, "sliding", "sliding", "full")
    found = roles(config, Quest(budget=64))
    own = [role.group for role in found if not role.windowed]
    assert [(group.start, group.end) for group in own] == [(0, 2), (0, 2), (2, 4), (2, 4)]
    assert [layer for layer, role in enumerate(found) if not role.windowed] == [2, 5, 8, 11]
    assert starts_and_turns(config, Quest(budget=64)) == [(0, 3, 2), (6, 3, 2), (12, 1, 1)]


def test_policy_needs_a_layer_without_window():
    windowed, mixed = windows(2, "sliding"), windows(2, "sliding", "full")
    check_layers(windowed, Vanilla())
    check_layers(mixed, DMS(window=4))
    check_layers(tiny_config(), KCache(values="host"))
    with pytest.raises(ConfigError, match="there is nothing for DMS to compress"):
        check_layers(windowed, DMS(window=4))
    with pytest.raises(ConfigError, match="values='device'"):
        check_layers(mixed, KCache(values="host", first_layers=0))


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("block", [1, 4, 6])
@pytest.mark.parametrize("num_layers", [2, 8])
def test_repeating_groups_get_their_own_layers(num_layers, block, gradients):
    config = windows(num_layers, "sliding", "sliding", "full")
    each = stretches(roles(config, Vanilla()), 3)
    windowed = [layer for layer in range(num_layers) if config.windowed[layer]]
    growing = [layer for layer in range(num_layers) if not config.windowed[layer]]
    parameters = {
        "matrix": jax.random.normal(KEY, (num_layers, 3, 3)),
        "vector": jnp.arange(3 * num_layers).reshape(num_layers, 3),
    }
    own = {
        "layer": jnp.arange(num_layers),
        "state": ByCache(growing=10 * jnp.array(growing), windowed=(100 * jnp.array(windowed),)),
    }

    def body(x, layer, index, role, own):
        state = own["state"][0] if role.windowed else own["state"]
        result = {"index": index, "layer": own["layer"], "vector": layer["vector"][0]}
        of_cache = ByCache(windowed=state) if role.windowed else ByCache(growing=state)
        return x @ layer["matrix"], result | {"state": of_cache}

    x, results = jax.jit(
        lambda parameters: scan_layers(
            body, jnp.eye(3), parameters, each, own, block=block, gradients=gradients
        )
    )(parameters)
    product = jnp.eye(3)
    for matrix in parameters["matrix"]:
        product @= matrix
    chex.assert_trees_all_close(x, product, rtol=1e-5)
    assert results["index"].tolist() == results["layer"].tolist() == list(range(num_layers))
    assert results["vector"].tolist() == [3 * layer for layer in range(num_layers)]
    assert results["state"].windowed.tolist() == [100 * layer for layer in windowed]
    if growing:
        assert results["state"].growing.tolist() == [10 * layer for layer in growing]
