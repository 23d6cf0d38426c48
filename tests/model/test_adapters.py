"""Heads and low-rank updates of several adapters, against each adapter alone."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dms_jax.model.adapters import Heads
from dms_jax.model.layers import Adapter
from dms_jax.model.low_rank import Factors
from dms_jax.policies.values import AdapterShape
from tests.support.models import tiny_config

SLOTS = np.array([[2, 0, 1, 2], [1, 1, 0, 2]])


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def filled(module: nnx.Module, random: np.random.Generator):
    """The module with random parameters."""
    return jax.tree.map(lambda x: jnp.asarray(random.normal(size=x.shape)), module)


@pytest.mark.parametrize("num_tokens", [1, 4], ids=["step", "prompt"])
@pytest.mark.parametrize(
    "shape",
    [AdapterShape(), AdapterShape(hidden=5, bias=True), AdapterShape(3, bias=True, late=True)],
    ids=["linear", "hidden", "late"],
)
def test_each_token_has_the_logits_of_its_own_head(shape, num_tokens):
    random, config = np.random.default_rng(0), tiny_config()
    heads = filled(Heads(config, shape, 3, stack=(), dtype=jnp.float64, rngs=nnx.Rngs(0)), random)
    graph, state = nnx.split(heads.each)
    alone: list[Adapter] = [
        nnx.merge(graph, jax.tree.map(lambda x, slot=slot: x[slot], state)) for slot in range(3)
    ]
    x, slots = jnp.asarray(random.normal(size=(2, num_tokens, 16))), SLOTS[:, :num_tokens]
    found = heads(x, jnp.asarray(slots))
    each = [head(x) for head in alone]
    for which, logits in enumerate(found):
        if logits is None:
            assert not shape.late
            assert all(own[which] is None for own in each)
            continue
        stacked = np.stack([np.asarray(own[which]) for own in each])  # [slots, B, K, T]
        expected = np.take_along_axis(stacked, slots[None, :, None], 0)[0]
        chex.assert_trees_all_close(np.asarray(logits), expected, atol=1e-12)
    assert (found[1] is not None) == shape.late


def test_an_update_uses_only_a_tokens_own_columns():
    random = np.random.default_rng(1)
    factors = filled(Factors({"embed": 6}, {"heads": 2, "head_dim": 3}, 5, (), jnp.float64), random)
    a, b = np.asarray(factors.lora_a[...]), np.asarray(factors.lora_b[...])
    columns, scales = (slice(0, 2), slice(2, 5)), (1.5, 0.25)
    table = np.zeros((3, 5))  # the third has no update
    for row, own, scale in zip(table, columns, scales, strict=False):
        row[own] = scale
    x = random.normal(size=(2, 4, 6))
    expected = np.zeros((2, 4, 2, 3))
    for place in np.ndindex(2, 4):
        if (slot := SLOTS[place]) < 2:
            own = columns[slot]
            expected[place] = scales[slot] * np.einsum("i,ir,rhd->hd", x[place], a[:, own], b[own])
    found = factors(jnp.asarray(x), jnp.asarray(table[SLOTS]))
    chex.assert_trees_all_close(np.asarray(found), expected, atol=1e-12)
    large = jnp.asarray(a).at[:, columns[1]].set(1e308)  # their products overflow
    factors.lora_a = nnx.Param(large)
    others = np.asarray(factors(jnp.asarray(1e3 * x), jnp.asarray(table[SLOTS])))
    chex.assert_trees_all_close(others[SLOTS != 1], 1e3 * expected[SLOTS != 1], atol=1e-9)
