"""A retrofit on a (2, 4) mesh of fake devices equals that on one device (law 5)."""

import chex
import jax
import jax.numpy as jnp
import numpy as np

from dms_jax.policies import DMC
from dms_jax.sharding import make_mesh
from dms_jax.training import retrofit
from dms_jax.training.parameters import parameters
from dms_jax.training.recipe import Stage
from dms_jax.training.trainer import Trainer
from tests.training.tiny import EAGER, documents, language_model, recipe


def test_a_mesh_changes_nothing_of_a_run_through_all_stages():
    """The decay of a neuron, the ramp and the steps after it (`test_layouts.py` has every mesh).

    Of language modelling: at the first step of the decay a student is its teacher, and the gradient
    what rounding left of zero.
    """
    stages = (
        Stage("neuron_decay", 2, 1e-3),
        Stage("ramp", 3, 1e-3, 4.0),
        Stage("train", 1, 1e-3, final_learning_rate=1e-4),
    )
    policy = DMC(offset=0.3, window=4)
    common_options = dict(batch_size=8, loss="language_modeling")
    options = recipe(*stages, micro_batch_size=2, **common_options)
    # The same passes of 4 sequences: 2 on each of 2 shards, or 4 on one.
    alone = recipe(*stages, micro_batch_size=4, **common_options)
    records = {"one": [], "mesh": []}
    with jax.enable_x64(True):
        model = language_model(dtype=jnp.float64, num_heads=8, num_kv_heads=4)
        common = dict(data=documents(), progress=False)
        mesh = make_mesh(2, 4)
        one = retrofit(model, policy, recipe=alone, on_step=records["one"].append, **common)
        many = retrofit(
            model, policy, recipe=options, mesh=mesh, on_step=records["mesh"].append, **common
        )
        assert many.mesh is mesh
        assert min(record["grad_norm"] for record in records["one"]) > 1e-3
        for name in ("loss", "lm_loss", "compression_loss", "evicted", "grad_norm"):
            chex.assert_trees_all_close(
                np.array([record[name] for record in records["mesh"]]),
                np.array([record[name] for record in records["one"]]),
                rtol=1e-9,
                custom_message=name,
            )
        chex.assert_trees_all_close(
            parameters(many.transformer), parameters(one.transformer), rtol=1e-9, atol=1e-11
        )


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
