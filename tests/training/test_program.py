"""The program of a step takes exactly the trainer's arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dms_jax.devices import DEVICES
from dms_jax.model.low_rank import LowRank
from dms_jax.policies import DMC, KVpop, KVzap
from dms_jax.sharding import make_mesh
from dms_jax.training import trainer as library
from dms_jax.training.program import program_of_shape
from dms_jax.training.recipe import Stage
from dms_jax.training.trainer import Trainer
from tests.support.instances import further
from tests.training.collectives import inputs, lower
from tests.training.tiny import ADAPTER, NEURON, language_model, recipe

DECAY, RAMP = Stage("neuron_decay", 1, 1e-3), Stage("ramp", 3, 1e-3, 4.0)


def described(tree):
    """Returns the structure of a tree, and shape, dtype and placement of its arrays."""
    arrays = [
        (x.shape, str(x.dtype), x.sharding.shard_shape(x.shape), x.sharding.device_set)
        for x in jax.tree.leaves(tree)
    ]
    return jax.tree.structure(tree), arrays


class Recorded(Exception):
    """The arguments of a step, recorded before it runs."""


@pytest.mark.parametrize(
    ("policy", "changes", "device"),
    [
        *further((ADAPTER, dict(trainable="all", loss="language_modeling"), None)),
        (ADAPTER, dict(compute_dtype="bfloat16", trainable="auto", packing="first_fit"), "h200"),
        *further(
            (
                ADAPTER,
                dict(trainable="low_rank", low_rank=LowRank(2, 4), compute_dtype="bfloat16"),
                None,
            ),
            (NEURON, dict(trainable="all", compute_dtype="bfloat16"), "h200"),
        ),
        (DMC(window=4), dict(trainable="all"), None),
    ],
    ids=["adapter-all", "adapter", "low-rank", "neuron", "dmc"],
)
def test_planned_step_has_the_trainers_arguments(policy, changes, device, monkeypatch):
    """With much memory constants are whole, and split over `model` alone."""
    mesh, sheet = make_mesh(2, 2), device and DEVICES[device]
    monkeypatch.setattr(library, "data_sheet", lambda kind: sheet)
    changes = dict(remat="all_but_attention") | changes
    made = recipe(DECAY, RAMP, batch_size=8, micro_batch_size=2, **changes)
    model = language_model(dtype=jnp.bfloat16)
    taken = []

    def record(*arguments):
        taken.extend(arguments)
        raise Recorded

    with jax.set_mesh(mesh):
        trainer = Trainer(model, policy, made, seed=0, mesh=mesh)
        monkeypatch.setattr(trainer, "_step", record)
        names = ["tokens", "loss_mask", "segment_ids"][: 3 if "packing" in changes else 2]
        dtypes = dict(tokens=np.int32, loss_mask=bool, segment_ids=np.int32)
        batch = {name: np.ones((4, made.sequence_length), dtypes[name]) for name in names}
        with pytest.raises(Recorded):
            trainer.step([batch, batch], made.progress(0, policy))
    memory = None if sheet is None else float(sheet.memory)
    program = program_of_shape(model.config, policy, made, mesh, "bfloat16", memory=memory)
    for name, x in (program.constants["frozen"] | program.constants["teacher"]).items():
        if name.endswith("down_proj.kernel"):  # [L, F, E]: F over `model`, E over `data`
            parts = x.shape[1] // 2, x.shape[2] // (1 if device else 2)
            assert x.sharding.shard_shape(x.shape)[1:] == parts
    planned = program.state, program.constants, *inputs(program, mesh, made.stages_for(policy)[0])
    for abstract, given in zip(planned, taken, strict=True):
        assert described(abstract) == described(given)


@pytest.mark.parametrize("policy", [KVzap(window=2), *further(KVpop(budget=8, window=2))], ids=repr)
def test_a_supervised_stage_has_its_own_loss(policy):
    made = recipe(Stage("supervise", 2, 1e-3), trainable="adapter", loss="language_modeling")
    config = language_model().config
    mesh = make_mesh(2, 1)
    program = program_of_shape(config, policy, made, mesh, "float32")
    assert "supervised_loss" in lower(program, mesh, made.stages[0]).as_text()
