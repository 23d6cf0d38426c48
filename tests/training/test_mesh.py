"""Training on a (2, 4) mesh of fake devices equals training on one device (law 5)."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dms_jax.policies import DMC
from dms_jax.sharding import make_mesh
from dms_jax.training import retrofit
from dms_jax.training.parameters import parameters
from dms_jax.training.recipe import Stage
from dms_jax.training.trainer import Trainer
from tests.training.tiny import EAGER, documents, language_model, recipe

RAMP = Stage("ramp", 3, 1e-3, 4.0, adapter_learning_rate=1e-2)
DECAY, HOLD = Stage("neuron_decay", 1, 1e-3), Stage("train", 1, 1e-3, final_learning_rate=1e-4)


@pytest.mark.parametrize(
    ("policy", "stages"),
    [(EAGER, (RAMP,)), (DMC(offset=0.3, window=4), (DECAY, RAMP, HOLD))],
    ids=["DMS", "DMC"],
)
def test_a_mesh_changes_nothing(policy, stages):
    # At the first step of the decay the student is the teacher, and its gradient what rounding left
    # of zero, which Adam must not blow up to steps of the size of others.
    common_options = dict(batch_size=8, epsilon=1e-4)
    options = recipe(*stages, micro_batch_size=2, **common_options)
    # The same passes of 4 sequences: 2 on each of 2 shards, or 4 on one.
    alone = recipe(*stages, micro_batch_size=4, **common_options)
    records = {"one": [], "mesh": []}
    with jax.enable_x64(True):
        model = language_model(adapter=True, dtype=jnp.float64, num_heads=8, num_kv_heads=4)
        common = dict(data=documents(), progress=False)
        mesh = make_mesh(2, 4)
        one = retrofit(model, policy, recipe=alone, on_step=records["one"].append, **common)
        many = retrofit(
            model, policy, recipe=options, mesh=mesh, on_step=records["mesh"].append, **common
        )
        assert many.mesh is mesh
        for name in ("loss", "distillation_loss", "lm_loss", "evicted", "grad_norm"):
            chex.assert_trees_all_close(
                np.array([record[name] for record in records["mesh"]]),
                np.array([record[name] for record in records["one"]]),
                rtol=1e-9,
                atol=1e-14,  # the divergence of the teacher from itself
                custom_message=name,
            )
        chex.assert_trees_all_close(
            parameters(many.transformer), parameters(one.transformer), rtol=1e-7, atol=1e-9
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
