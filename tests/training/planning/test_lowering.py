"""What a planned step takes is what a trainer's step takes: shapes, types and shardings."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dms_jax.model.low_rank import LowRank
from dms_jax.policies import DMC, KVpop, KVzap
from dms_jax.sharding import make_mesh
from dms_jax.training.planning.lowering import AbstractStep, bytes_a_device
from dms_jax.training.recipe import Stage
from dms_jax.training.step import Constants, Passes, ScheduleValues
from dms_jax.training.trainer import Trainer
from tests.support.instances import further
from tests.training.tiny import ADAPTER, NEURON, language_model, recipe

DECAY, RAMP = Stage("neuron_decay", 1, 1e-3), Stage("ramp", 3, 1e-3, 4.0)


def described(tree):
    """Returns shape, type and place of every array."""
    return [
        (x.shape, str(x.dtype), x.sharding.shard_shape(x.shape), x.sharding.device_set)
        for x in jax.tree.leaves(tree)
    ]


class Recorded(Exception):
    """The arguments of a step, taken before it runs."""


@pytest.mark.parametrize(
    ("policy", "changes"),
    [
        *further((ADAPTER, dict(trainable="all", loss="language_modeling"))),
        (ADAPTER, dict(compute_dtype="bfloat16", trainable="auto", packing="first_fit")),
        *further(
            (ADAPTER, dict(trainable="low_rank", low_rank=LowRank(2, 4), compute_dtype="bfloat16")),
            (NEURON, dict(trainable="all", compute_dtype="bfloat16")),
        ),
        (DMC(window=4), dict(trainable="all")),
    ],
    ids=["adapter-all", "adapter", "low-rank", "neuron", "dmc"],
)
def test_it_takes_what_the_trainer_takes(policy, changes, monkeypatch):
    mesh = make_mesh(2, 2)
    made = recipe(DECAY, RAMP, batch_size=8, micro_batch_size=2, **changes)
    model = language_model(dtype=jnp.bfloat16)
    with jax.set_mesh(mesh):
        trainer = Trainer(model, policy, made, seed=0, mesh=mesh)
        taken = []

        def record(state, constants, passes, schedule):
            values = Constants(**constants), Passes(**passes), ScheduleValues(**schedule)
            taken.append((state, *values))
            raise Recorded

        monkeypatch.setattr(trainer, "_step", record)
        names = ["tokens", "loss_mask", "segment_ids"][: 3 if "packing" in changes else 2]
        dtypes = dict(tokens=np.int32, loss_mask=bool, segment_ids=np.int32)
        batch = {name: np.ones((4, made.sequence_length), dtypes[name]) for name in names}
        with pytest.raises(Recorded):
            trainer.step([batch, batch], made.progress(0, policy))
    step = AbstractStep(model.config, policy, made, mesh, "bfloat16")
    inputs = step.inputs(made.stages_for(policy)[0])
    assert inputs.structures == tuple(map(jax.tree.structure, taken[0]))
    for planned, own in zip(inputs.arguments[:3], taken[0], strict=False):
        assert described(planned) == described(own)


@pytest.mark.parametrize("policy", [KVzap(window=2), *further(KVpop(budget=8, window=2))], ids=repr)
def test_a_stage_that_supervises_is_planned_as_one(policy):
    """It has a loss of its own, in whose step only the scorer has gradients."""
    made = recipe(Stage("supervise", 2, 1e-3), trainable="adapter", loss="language_modeling")
    step = AbstractStep(language_model().config, policy, made, make_mesh(2, 1), "float32")
    text = step.lower(step.inputs(made.stages[0])).as_text()
    assert "supervised_loss" in text


def test_bytes_of_a_device_are_those_of_its_shards():
    mesh = make_mesh(2, 2)
    step = AbstractStep(language_model().config, ADAPTER, recipe(), mesh, "float32")
    inputs = step.inputs(RAMP)
    # Parameters, two moments of each, and two counters.
    assert bytes_a_device(inputs.state) == 3 * bytes_a_device(step.parameters) + 8
    kernel = step.parameters["layers.mlp.down_proj.kernel"]  # [L, F, E]
    assert bytes_a_device(kernel) == 2 * 24 * 16 * 4 / 4


def test_decay_and_ramp_differ_in_the_neuron_alone():
    made = recipe(DECAY, dataclasses.replace(RAMP, batch_size=8), micro_batch_size=4)
    step = AbstractStep(language_model().config, NEURON, made, make_mesh(1, 1), "float32")
    decay, ramp = (step.inputs(stage) for stage in made.stages)
    assert len(decay.schedule) == len(ramp.schedule) + 1
    shapes = [next(iter(inputs.passes.values())).shape for inputs in (decay, ramp)]
    assert shapes == [(1, 4, 12), (2, 4, 12)]
