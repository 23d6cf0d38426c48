"""Training over a mesh: placements, split rows, refusals (`test_layouts.py` has law 5)."""

from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dms_jax.command_line.retrofitting import Config
from dms_jax.errors import ConfigError, DataError
from dms_jax.policies import DMC, KVzap
from dms_jax.sharding import make_mesh
from dms_jax.training import retrofit
from dms_jax.training.recipe import Stage
from dms_jax.training.shards import check_split
from dms_jax.training.trainer import Trainer
from tests.training.tiny import EAGER, NEURON, documents, language_model, recipe


def test_parameters_and_moments_are_spread_over_the_mesh():
    mesh = make_mesh(2, 4)
    model = language_model(adapter=True, num_heads=8, num_kv_heads=4)
    with jax.set_mesh(mesh):
        trainer = Trainer(model, EAGER, recipe(), seed=0, mesh=mesh)
    kernel = "layers.mlp.down_proj.kernel"  # [L, F, E]: F over `model`, E over `data`
    arrays = [trainer.state.parameters[kernel]]
    (adam,) = [s for s in trainer.state.optimizer if hasattr(s, "mu")]
    arrays += [adam.mu[kernel], adam.nu[kernel]]
    for array in arrays:
        layers, hidden, width = array.shape
        chex.assert_shape(array.addressable_shards[0].data, (layers, hidden // 4, width // 2))


@pytest.mark.nightly
@pytest.mark.parametrize("policy", [DMC(offset=0.3, window=4), NEURON], ids=lambda p: p.name)
def test_merges_and_borrowed_neurons_with_split_rows(policy):
    """DMC's running means, and decisions by a later token; `test_layouts.py` has DMS's adapter."""
    batch = {"tokens": np.random.default_rng(0).integers(0, 29, (2, 24)).astype(np.int32)}
    batch["loss_mask"] = np.ones((2, 24), bool)
    batch["segment_ids"] = np.repeat([[1] * 7 + [2] * 15 + [0] * 2], 2, axis=0)
    options = recipe(loss="language_modeling", sequence_length=24, batch_size=2)
    records = []
    with jax.enable_x64(True):
        model = language_model(dtype=jnp.float64, num_heads=4, num_kv_heads=2)
        for mesh in (make_mesh(1, 1), make_mesh(1, 1, sequence=4)):
            with jax.set_mesh(mesh):
                trainer = Trainer(model, policy, options, 0, mesh)
                metrics = [trainer.step([batch], options.progress(i, policy)) for i in (1, 2)]
                records.append(jax.device_get(metrics))
    assert records[0][1]["evicted"] > 0.01
    chex.assert_trees_all_close(*records, rtol=1e-9, atol=1e-14)


def test_indivisible_rows_are_refused():
    mesh = make_mesh(1, 1, sequence=4)
    options = recipe(sequence_length=12)
    with pytest.raises(ConfigError, match=r"12 tokens cannot be split over 4.*multiple of 8"):
        check_split(options, EAGER, mesh)
    check_split(options, EAGER, make_mesh(2, 4))
    learning = recipe(Stage("supervise", 2, 1e-3), sequence_length=16)
    with pytest.raises(ConfigError, match=r"KVzap learns.*'sequence' splits the queries"):
        check_split(learning, KVzap(), mesh)


def test_a_refused_run_leaves_no_directory(tmp_path):
    refused = [
        dict(recipe=recipe(sequence_length=12), mesh=make_mesh(1, 1, sequence=4)),
        dict(recipe=recipe(batch_size=2), mesh=make_mesh(4, 1)),
        dict(data=[]),
    ]
    for options in refused:
        told: dict[str, Any] = dict(recipe=recipe(), data=documents()) | options
        with pytest.raises((ConfigError, DataError)):
            retrofit(language_model(), EAGER, out=tmp_path / "run", **told)
        assert not (tmp_path / "run").exists()


def test_the_command_line_makes_a_mesh_with_rows_split():
    options: dict[str, Any] = dict(model="any", data=(), out=Path("out"))
    mesh = Config(**options, data_shards="all", model_shards=2, sequence_shards=2).make_mesh()
    assert mesh is not None
    assert dict(mesh.shape) == {"data": 2, "sequence": 2, "model": 2}
    mesh = Config(**options, data_shards="all", expert_shards=2, sequence_shards=2).make_mesh()
    assert mesh is not None
    assert dict(mesh.shape) == {"data": 2, "sequence": 2, "experts": 2, "model": 1}
    with pytest.raises(
        ConfigError, match="--data-shards 2 x --sequence-shards 8 needs 16 devices; there are 8"
    ):
        Config(**options, data_shards=2, sequence_shards=8).make_mesh()
