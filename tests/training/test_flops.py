"""Operations of a training step, counted by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from dms_jax.config import Experts
from dms_jax.devices import DEVICES, data_sheet
from dms_jax.training.flops import (
    attention_operations,
    layer_parameters,
    peak_operations,
    token_operations,
)
from dms_jax.training.parameters import shapes
from dms_jax.training.step import Passes, visible_keys
from tests.support.models import random_model, tiny_config
from tests.training.tiny import language_model

# E = 16, F = 24, H = 4, K = 2, D = 8, V = 31, two layers.
LAYER = 16 * (4 + 2 + 2) * 8 + 4 * 8 * 16 + 3 * 16 * 24


def test_layer_parameters_count_the_matrices():
    assert layer_parameters(shapes(language_model(adapter=True).transformer), None) == 2 * LAYER


def test_token_operations():
    config = language_model().config
    forward = 2 * 2 * LAYER + 2 * 16 * 31 + 4 * 2 * 4 * 8 * 10.5
    assert token_operations(config, 2 * LAYER, 10.5) == 3 * forward
    assert token_operations(config, 2 * LAYER, 10.5, teacher=True) == 4 * forward
    assert token_operations(config, 2 * LAYER, 10.5, teacher=True, frozen=True) == 3 * forward
    layers = forward - 2 * 16 * 31
    assert token_operations(config, 2 * LAYER, 10.5, stage="supervise", teacher=True) == layers


def test_operations_of_windows_and_experts():
    config = tiny_config(
        num_layers=3,
        layer_types=("sliding", "full"),
        window=4,
        experts=Experts(count=6, per_token=2),
    )
    attention = 4 * 4 * 8  # of a key
    assert attention_operations(config, 10.5) == attention * (2 * 4 + 10.5)
    assert attention_operations(config, 2.5) == attention * 3 * 2.5
    transformer = random_model(config, dtype=jnp.float32)
    layer = 16 * (4 + 2 + 2) * 8 + 4 * 8 * 16 + 16 * 6 + 2 * 3 * 16 * 24
    assert layer_parameters(shapes(transformer), config.experts) == 3 * layer


def test_visible_keys_are_those_of_the_document():
    ids = np.array([[[1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 1, 1]]], np.int32)
    ones = jnp.ones(ids.shape, jnp.int32)
    keys, share = visible_keys(Passes(ones, ones > 0, jnp.asarray(ids)))
    assert keys == pytest.approx((1 + 2 + 3 + 1 + 2 + 21) / 11)
    assert share == pytest.approx(11 / 12)
    keys, share = visible_keys(Passes(ones, ones > 0))
    assert (keys, share) == (3.5, 1)


def test_data_sheet_is_found_by_jax_device_kind():
    assert data_sheet("NVIDIA H200") is DEVICES["h200"]
    assert data_sheet("TPU v5 lite") is DEVICES["v5e"]
    assert data_sheet("NVIDIA H100 PCIe") is None
    assert peak_operations(None) is None  # a CPU
