"""The fields of a state declare their axes, and a field without declared axes is refused."""

import dataclasses
import importlib.util
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from jax.experimental import topologies
from jax.sharding import PartitionSpec

from dms_jax import sharding
from dms_jax.errors import ConfigError
from dms_jax.model.caching import cache_specs, init_cache
from dms_jax.policies import POLICIES, Vanilla
from dms_jax.policies.values import PolicyState
from dms_jax.sharding import axes, declared_axes
from tests.support.models import tiny_config


@struct.dataclass
class Silent:
    """A state that declares the axes of only one of its fields."""

    ring: Any = struct.field(metadata=axes("sequences", "kv_heads"))
    notes: Any = None


@dataclasses.dataclass(frozen=True)
class Careless(Vanilla):
    """A policy whose state, per row or per page, declares no axes."""

    per_row: bool = True

    def init_state(self, shape):
        ring = jnp.zeros(shape.rows)
        if self.per_row:
            return PolicyState(rows=Silent(ring=ring, notes=jnp.zeros(shape.rows)))
        pages = Silent(ring=None, notes=jnp.zeros(shape.num_pages))
        return PolicyState(rows=Silent(ring=ring), pages=pages)


def cache_of(policy, num_sequences=4):
    return init_cache(
        tiny_config(num_heads=8, num_kv_heads=4),
        policy,
        num_sequences=num_sequences,
        num_pages=16,
        page_size=4,
        dtype=jnp.dtype(jnp.float32),
        kv_dtype="float8_e4m3",
    )


@pytest.mark.parametrize(
    ("data", "model", "expected"),
    [
        (4, 2, [[0, 2], [4, 6], [1, 3], [5, 7]]),  # `model` within a host
        (2, 4, [[0, 2, 4, 6], [1, 3, 5, 7]]),
        (1, 8, [[0, 2, 4, 6, 1, 3, 5, 7]]),  # it must span them
    ],
)
def test_data_axis_takes_the_slow_links(monkeypatch, data, model, expected):
    """Two hosts with alternating device numbers."""
    hosts = {device: device.id % 2 for device in jax.devices()}
    monkeypatch.setattr(type(jax.devices()[0]), "slice_index", property(hosts.get), raising=False)
    mesh = sharding.make_mesh(data, model)
    assert [[device.id for device in row] for row in mesh.devices] == expected


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
@pytest.mark.parametrize(("data", "model"), [(64, 4), (16, 16), (1, 256)])
def test_torus_axes_are_split_if_necessary(data, model):
    """16 x 16 chips: `model` is a part of one of their axes."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v6e:16x16").devices
    mesh = sharding.make_mesh(data, model, devices=devices)
    assert mesh.devices.shape == (data, model)
    assert len(set(mesh.devices.flat)) == 256
    near = np.array([[device.coords for device in row] for row in mesh.devices])
    steps = np.abs(np.diff(near, axis=1)).sum(-1)
    assert (steps == 1).mean() > 0.9  # neighbours along `model` are linked


@pytest.mark.parametrize("per_row", [True, False])
def test_state_without_declared_axes_is_refused_by_name(per_row):
    with pytest.raises(ConfigError, match=r"^Silent\.notes declares no axes"):
        cache_of(Careless(per_row=per_row))


def test_mismatched_axes_are_refused():
    with pytest.raises(ConfigError, match="'pagse'; the axes of caches are layers, sequences"):
        axes("pagse")
    with pytest.raises(ConfigError, match=r"Silent.ring .* sequences, kv_heads, .* shape \(3,\)"):
        declared_axes(Silent(ring=jnp.zeros(3)))
    with pytest.raises(ConfigError, match="outside any state"):
        declared_axes(jnp.zeros(3))


@pytest.mark.parametrize("name", POLICIES)
def test_every_cache_is_split_by_rows_and_pages(name):
    policy = POLICIES[name]()
    cache = jax.eval_shape(lambda: cache_of(policy))
    with jax.set_mesh(sharding.make_mesh(2, 4)):
        specs = cache_specs(cache, num_kv_heads=4)
    rows = PartitionSpec(None, "data", "model")
    pages = PartitionSpec(("data", "model"))
    assert specs.page_table == specs.lengths == rows
    assert specs.seen == specs.max_lengths == PartitionSpec("data")
    assert all(spec == rows for spec in jax.tree.leaves(specs.row_state))
    assert all(spec == pages for spec in jax.tree.leaves((specs.pool, specs.page_state)))
    chex.assert_trees_all_equal_structs(specs, cache)


def test_experts_and_model_axes_split_parameters():
    """Experts are split over `experts` and each one over `model`; otherwise over both together."""
    mesh = sharding.make_mesh(2, 2, experts=2)
    assert sharding.mesh_sizes(mesh) == (2, 1, 4)
    names = ("experts", "embed", "gate_up", "mlp")
    with jax.set_mesh(mesh):
        assert sharding.axis_size(sharding.MODEL) == 4
        assert sharding.row_axes(2, 8) == ("data", ("experts", "model"))
        assert sharding.row_axes(3, 2) == (None, None)
        spec = PartitionSpec("experts", None, None, "model")
        assert sharding.parameter_partition(names, (4, 8, 2, 16)) == spec
        spec = PartitionSpec(None, None, None, ("experts", "model"))
        assert sharding.parameter_partition(names, (5, 8, 2, 16)) == spec
        spec = PartitionSpec("experts", None, None, None)
        assert sharding.parameter_partition(names, (4, 8, 2, 15)) == spec
        spec = sharding.cache_spec(("pages", "heads"), "data", ("experts", "model"))
        assert spec == PartitionSpec(("data", "experts", "model"), ("experts", "model"))
    alone = sharding.make_mesh(2, 4)
    assert alone.axis_names == ("data", "model")
    with jax.set_mesh(alone):
        assert sharding.row_axes(2, 8) == ("data", "model")
        assert sharding.parameter_partition(names, (4, 8, 2, 16)) == PartitionSpec(
            None, None, None, "model"
        )
    with pytest.raises(ConfigError, match="make_mesh: experts"):
        sharding.make_mesh(experts=0)
