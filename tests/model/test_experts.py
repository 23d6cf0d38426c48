"""Mixtures of experts against a loop over tokens, for every implementation and layout."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from dms_jax.config import Experts
from dms_jax.model import layers
from dms_jax.model.layers import ExpertMatrices, ExpertMLP, Routed
from dms_jax.sharding import DECODING_RULES, make_mesh
from dms_jax.training.parameters import parameters, rebuilder, shardings
from tests.oracles.dmc import sigmoid
from tests.oracles.trace import softmax
from tests.support.instances import further
from tests.support.models import tiny_config

BATCH, LENGTH = 4, 5
QWEN = tiny_config(experts=Experts(4, 2))
UNNORMALIZED = tiny_config(experts=Experts(6, 3, normalized=False))
GPT_OSS = dataclasses.replace(
    tiny_config(experts=Experts(4, 2), biases=True, qk_norm=False), activation="clamped_swiglu"
)
CONFIGS = {"qwen": QWEN, "unnormalized": UNNORMALIZED, "gpt_oss": GPT_OSS}


@functools.cache
def module(name: str) -> ExpertMLP:
    """One layer's experts, with biases and gates large enough to be clamped."""
    made = ExpertMLP(CONFIGS[name], stack=(), dtype=jnp.float64, rngs=nnx.Rngs(0))
    random = np.random.default_rng(3)
    return jax.tree.map(lambda x: jnp.asarray(3 * random.normal(size=x.shape) / x.ndim), made)


def tokens(length: int = LENGTH) -> np.ndarray:
    return np.random.default_rng(4).normal(size=(BATCH, length, QWEN.hidden_size))


def activated(name: str, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    if name != "gpt_oss":
        return gate * sigmoid(gate) * up
    gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
    return gate * sigmoid(1.702 * gate) * (up + 1)


def values(linear) -> tuple[np.ndarray, np.ndarray | float]:
    bias = linear.bias
    return np.asarray(linear.kernel[...]), 0.0 if bias is None else np.asarray(bias[...])


def oracle(name: str, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Token by token: outputs, numbers of tokens of each expert, sums of probabilities."""
    mlp, experts = module(name), CONFIGS[name].experts
    assert experts is not None
    (router, router_bias), (gate_up, gate_up_bias), (down, down_bias) = (
        values(each) for each in (mlp.router, mlp.gate_up_proj, mlp.down_proj)
    )
    y, counts, sums = np.zeros_like(x), np.zeros(experts.count), np.zeros(experts.count)
    for place in np.ndindex(x.shape[:2]):
        logits = x[place] @ router + router_bias
        sums += softmax(logits)
        best = np.argsort(-logits)[: experts.per_token]
        weights = softmax(logits[best]) if experts.normalized else softmax(logits)[best]
        for expert, weight in zip(best, weights, strict=True):
            counts[expert] += 1
            both = np.einsum("E,EgF->gF", x[place], gate_up[expert])
            both += gate_up_bias if np.isscalar(gate_up_bias) else gate_up_bias[expert]
            own = activated(name, *both) @ down[expert]
            y[place] += weight * (
                own + (down_bias if np.isscalar(down_bias) else down_bias[expert])
            )
    return y, counts, sums


@pytest.mark.parametrize("name", CONFIGS)
def test_a_layer_equals_numpy(name):
    with jax.enable_x64(True):
        x = tokens()
        found = module(name)(jnp.asarray(x))
        chex.assert_trees_all_close(found, oracle(name, x)[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", CONFIGS)
def test_dense_experts_equal_grouped_ones(name):
    """The form for steps of few sequences on GPUs."""
    with jax.enable_x64(True):
        mlp, x = module(name), tokens(1)
        given = jnp.asarray(x)
        flat = [each[:, 0] for each in (given, *mlp.route(given))]
        matrices = [each.matrices(x.dtype) for each in (mlp.gate_up_proj, mlp.down_proj)]
        found = layers._every_expert(mlp.activation, *flat, *matrices)
        chex.assert_trees_all_close(found, oracle(name, x)[0][:, 0], rtol=0, atol=1e-12)


def test_overflow_in_one_expert_spares_other_tokens():
    """0 times infinity is NaN."""
    matrices = ExpertMatrices(jnp.full((2, 1, 2, 1), jnp.inf).at[0].set(1.0), None)
    down = ExpertMatrices(jnp.ones((2, 1, 1)), None)
    given = (jnp.ones((1, 1)), jnp.ones((1, 1)), jnp.zeros((1, 1), jnp.int32), matrices, down)
    assert jnp.isfinite(layers._every_expert("silu", *given)).all()


@pytest.mark.parametrize(("sequences", "length", "every"), [(4, 1, 1), (4, 2, 0), (129, 1, 0)])
def test_small_steps_compute_every_expert(sequences, length, every, monkeypatch):
    """One sequence with two of four experts need not read them all."""
    called = []
    real = layers._every_expert
    monkeypatch.setattr(layers, "_every_expert", lambda *args: called.append(1) or real(*args))
    x = jnp.zeros((sequences, length, QWEN.hidden_size))
    jax.eval_shape(module("qwen"), x)
    assert len(called) == every
    jax.eval_shape(module("qwen"), x[:1])
    assert len(called) == every


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("gpt_oss", dict(data=2, experts=2, model=2)),
        *further(
            ("qwen", dict(experts=4)),
            ("qwen", dict(data=4, experts=2)),
            ("gpt_oss", dict(model=4)),
            ("unnormalized", dict(experts=4, model=2)),  # of 6 experts: each is split over both
        ),
    ],
    ids=str,
)
def test_a_mesh_changes_no_result(name, axes):
    """Outputs and gradients stay equal when experts, their matrices, or tokens are split."""

    def both(mlp, x):
        return jax.value_and_grad(lambda mlp, x: (mlp(x) ** 2).sum(), argnums=(0, 1))(mlp, x)

    with jax.enable_x64(True):
        x, mlp = jnp.asarray(tokens()), module(name)
        expected = jax.jit(both)(mlp, x)
        mesh = make_mesh(**axes)
        places = shardings(mlp, mesh, DECODING_RULES)
        split = rebuilder(mlp)(
            {key: jax.device_put(each, places[key]) for key, each in parameters(mlp).items()}
        )
        kernel = split.down_proj.kernel[...]
        parts = kernel.size // kernel.addressable_shards[0].data.size
        assert parts == axes.get("experts", 1) * axes.get("model", 1)
        with jax.set_mesh(mesh):
            found = jax.jit(both)(split, jax.device_put(x, NamedSharding(mesh, PartitionSpec())))
        chex.assert_trees_all_close(
            jax.device_get(jax.tree.leaves(found)),
            jax.device_get(jax.tree.leaves(expected)),
            rtol=1e-11,
            atol=1e-11,
        )


@pytest.mark.parametrize("name", CONFIGS)
def test_routed_counts_tokens_and_sums_probabilities(name):
    """Uncounted tokens are left out."""
    with jax.enable_x64(True):
        x = tokens()
        counted = np.zeros(x.shape[:2], bool)
        counted[:, 1:4] = True
        found = module(name).routed(jnp.asarray(x), jnp.asarray(counted))
        _, counts, sums = oracle(name, x[:, 1:4])
        chex.assert_trees_all_close(found, Routed(counts, sums), rtol=1e-12)
