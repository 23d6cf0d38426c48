"""Training of mixtures of experts: equal on any mesh and one device; balance of routers.

The experts' own products and gradients are compared in `tests/model/test_experts.py`.
"""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dms_jax.config import Experts
from dms_jax.model.language_model import LanguageModel
from dms_jax.model.layers import Routed
from dms_jax.model.low_rank import LowRank
from dms_jax.policies import Vanilla
from dms_jax.sharding import make_mesh
from dms_jax.training.step import expert_load
from dms_jax.training.trainer import Trainer
from tests.support.instances import nightly_but
from tests.support.models import VOCABULARY, random_model, tiny_config
from tests.training.tiny import EAGER, recipe

CONFIG = tiny_config(num_heads=8, num_kv_heads=4, experts=Experts(4, 2), biases=True, qk_norm=False)
SEQUENCES, LENGTH, STEPS = 4, 16, 2
BATCH = {
    "tokens": np.random.default_rng(0).integers(0, VOCABULARY, (SEQUENCES, LENGTH), np.int32),
    "loss_mask": np.ones((SEQUENCES, LENGTH), bool),
    "segment_ids": np.repeat([[1] * 6 + [2] * 7 + [0] * 3], SEQUENCES, axis=0),
}


def trained(mesh, trainable: Any):
    """Returns the metrics of some steps, and Adam's first moment, a sum of gradients."""
    with jax.enable_x64(True), jax.set_mesh(mesh):
        model = LanguageModel(random_model(CONFIG, adapter=True))
        options = recipe(
            batch_size=SEQUENCES,
            sequence_length=LENGTH,
            remat="all_but_attention",
            trainable=trainable,
            low_rank=LowRank(rank=2),
        )
        trainer = Trainer(model, EAGER, options, seed=0, mesh=mesh)
        metrics = [
            jax.device_get(trainer.step([BATCH], options.progress(step, EAGER)))
            for step in range(STEPS)
        ]
        (adam,) = [s for s in trainer.state.optimizer if hasattr(s, "mu")]
        return metrics, jax.device_get(adam.mu), trainer.state.parameters


@functools.cache
def alone(trainable):
    return trained(make_mesh(1, 1), trainable)


MESHES = [
    (dict(data=2, model=2, experts=2), "all"),
    (dict(experts=4), "all"),
    (dict(data=2, experts=4), "low_rank"),
    (dict(sequence=2, experts=2), "all"),
    (dict(data=2, model=4), "all"),
]


@pytest.mark.parametrize(("axes", "trainable"), nightly_but(MESHES[:1], MESHES), ids=str)
def test_a_mesh_changes_nothing(axes, trainable):
    metrics, moments, parameters = trained(make_mesh(**axes), trainable)
    expected, others, _ = alone(trainable)
    chex.assert_trees_all_close(metrics, expected, rtol=1e-9, atol=1e-14)
    for name, moment in others.items():
        largest = np.abs(moment).max()
        assert largest > 0, name
        chex.assert_trees_all_close(moments[name], moment, rtol=0, atol=1e-9 * largest)
    if trainable == "all" and "experts" in axes:
        kernel = parameters["layers.mlp.down_proj.kernel"]
        assert kernel.sharding.spec[1] == "experts"
        assert kernel.addressable_shards[0].data.shape[1] == 4 // axes["experts"]
    if trainable == "low_rank":
        assert not any("mlp" in name for name in others)  # routers and experts are frozen


def test_router_balance_equals_the_switch_transformer():
    """X sum_j f_j P_j over tokens outside padding, by a loop over layers and tokens."""
    with jax.enable_x64(True):
        random = np.random.default_rng(1)
        logits = random.normal(size=(3, 50, 6))  # layers, tokens, experts
        probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        chosen = np.argsort(-logits, -1)[..., :2]
        balances, busiest = [], 0.0
        for layer in range(3):
            shares = np.bincount(chosen[layer].ravel(), minlength=6) / 100
            balances.append(6 * (shares * probabilities[layer].mean(0)).sum())
            busiest = max(busiest, 6 * shares.max())
        counts = np.stack([np.bincount(each.ravel(), minlength=6) for each in chosen]) / 50
        found = expert_load(Routed(jnp.asarray(counts), jnp.asarray(probabilities.mean(1))))
        assert found["router_balance"] == pytest.approx(np.mean(balances), rel=1e-12)
        assert found["busiest_expert"] == pytest.approx(busiest, rel=1e-12)
    even = Routed(jnp.full((2, 4), 0.5), jnp.full((2, 4), 0.25))
    assert expert_load(even) == {"router_balance": 1.0, "busiest_expert": 1.0}
    assert expert_load(None) == {}


def test_a_retrofit_reports_the_balance():
    metrics, _, _ = alone("all")
    for each in metrics:
        assert 1.0 < each["router_balance"] < 4.0
        assert 1.0 < each["busiest_expert"] <= 2.0  # the two choices are different experts


def test_padding_counts_in_no_balance():
    with jax.enable_x64(True):
        model, ids = random_model(CONFIG), jnp.asarray(BATCH["segment_ids"])
        other = np.where(BATCH["segment_ids"] > 0, BATCH["tokens"], 5)
        run = jax.jit(lambda tokens: model(tokens, Vanilla(), segment_ids=ids).routed)
        one, two = run(BATCH["tokens"]), run(other)
        chex.assert_trees_all_close(one, two, rtol=1e-12)
        counted = (BATCH["segment_ids"] > 0).sum()
        assert one.tokens.sum(-1).tolist() == [2 * counted] * CONFIG.num_layers
        assert one.probabilities.sum(-1) == pytest.approx([counted] * CONFIG.num_layers)
