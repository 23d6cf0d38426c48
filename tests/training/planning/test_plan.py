"""Plans: memory, seconds and advice from known figures, and one compiled for a TPU."""

import dataclasses
import importlib.util

import pytest

import dms_jax
from dms_jax.config import ModelConfig
from dms_jax.devices import DEVICES
from dms_jax.errors import ConfigError
from dms_jax.training import recipes
from dms_jax.training.planning import Memory, Plan, find_machine
from dms_jax.training.planning.collectives import Collective
from tests.training.tiny import ADAPTER, NEURON

RECIPE = recipes.dms_paper(4)
MEMORY = Memory(10e9, 20e9, 5e9, 10e9, 3e9, 7e9)
GATHERED = Collective("all-gather", "bf16[4096,4096]", 8, 1000, 45e6)


def planned(**changes) -> Plan:
    options = dict(
        machine=find_machine("8xh200"),
        mesh=(8, 1),
        recipe=RECIPE,
        policy=NEURON,
        parameters=8_000_000_000,
        memory=MEMORY,
        collectives=[GATHERED],
        operations=8 * 989e12,
        model_operations=0.8 * 8 * 989e12,
        stages=(("neuron_decay", 2000, 128), ("ramp", 300, 128)),
    )
    return Plan(**(options | changes))


def test_seconds():
    plan = planned()
    assert plan.compute_seconds == pytest.approx(2)  # at half of the peak
    assert plan.communication_seconds == pytest.approx(0.1)  # 45 GB through NVLink
    assert plan.step_seconds == pytest.approx((2, 2.1))
    assert plan.run_seconds == pytest.approx((2 * 2300, 2.1 * 2300))
    hosts = planned(
        machine=find_machine("32xh200"), collectives=[dataclasses.replace(GATHERED, group=32)]
    )
    assert hosts.communication_seconds == pytest.approx(0.9)  # 45 GB through the network
    # A stage of fewer passes takes less time a step.
    small = planned(stages=(("neuron_decay", 2000, 128), ("ramp", 300, 32)))
    assert small.run_seconds[0] == pytest.approx(2 * (300 + 2000 * 4))


def test_a_plan_that_fits_is_told_without_advice():
    plan = planned()
    assert plan.fits
    text = str(plan)
    for line in (
        "8.0B parameters, DMS(window=3",
        "On 8 h200 (8xh200): data 8, model 1",
        "2,300 optimizer steps (2,000 of neuron_decay, 300 of ramp), 9.65B tokens",
        "A step: 128 passes of 8 sequences of 4,096 tokens",
        "Estimated: no compiler for GPUs works without one",
        "together                                         55.00",
        "of h200: fits",
        "45 GB sent",
        "1,000 x all-gather bf16[4096,4096] over 8",
        "computing 2 s, sending 0.1 s: 2 s to 2.1 s",
        "38% to 40% of the peak",
        "1.28 hours to 1.34 hours, 10 to 11 device-hours",
    ):
        assert line in text
    assert "What would change that" not in text
    assert "Estimated" not in str(planned(machine=find_machine("v5p-16"))).splitlines()[4]


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        (dict(memory=dataclasses.replace(MEMORY, optimizer=200e9)), "more devices: 16 would"),
        (dict(memory=dataclasses.replace(MEMORY, optimizer=200e9)), "trainable='low_rank'"),
        (dict(memory=dataclasses.replace(MEMORY, temporaries=200e9)), "model_shards=2"),
        (dict(memory=dataclasses.replace(MEMORY, temporaries=200e9)), "a sequence_length of 2,048"),
        (
            dict(
                memory=dataclasses.replace(MEMORY, temporaries=200e9),
                recipe=dataclasses.replace(RECIPE, micro_batch_size=2),
            ),
            "a smaller micro_batch_size",
        ),
        (
            dict(
                memory=dataclasses.replace(MEMORY, activations=200e9),
                recipe=dataclasses.replace(RECIPE, remat="nothing"),
            ),
            "remat='everything'",
        ),
        (dict(collectives=[dataclasses.replace(GATHERED, count=10**6)]), "micro_batch_size=2, if"),
    ],
)
def test_what_to_change(changes, advice):
    plan = planned(**changes)
    assert f"  - {advice}" in str(plan)
    assert plan.fits == ("memory" not in changes)


def test_a_program_that_was_refused_is_told():
    memory = dataclasses.replace(MEMORY, temporaries=300e9, exact=False)
    text = str(planned(memory=memory, collectives=[]))
    assert "DOES NOT FIT" in text
    assert "refused the program" in text


def test_what_cannot_be_planned_is_refused():
    config = ModelConfig(64, 32, 64, 2, 4, 2, 8, 64)
    with pytest.raises(ConfigError, match="There is no machine 'h300'"):
        dms_jax.plan(config, ADAPTER, recipe=RECIPE, machine="h300")
    with pytest.raises(ConfigError, match="8 devices, which model_shards=3 does not divide"):
        dms_jax.plan(config, ADAPTER, recipe=RECIPE, machine="8xh200", model_shards=3)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_a_step_is_compiled_for_a_slice():
    config = ModelConfig(512, 256, 512, 2, 4, 2, 128, 512)
    recipe = dataclasses.replace(
        recipes.pretraining(10),
        sequence_length=128,
        batch_size=8,
        micro_batch_size=1,
        packing="concatenate",
        unroll=False,
    )
    plan = dms_jax.plan(config, recipe=recipe, machine="v5p-8", model_shards=2)
    assert plan.mesh == (2, 2)
    assert plan.stages == (("train", 10, 4),)
    # Every matrix is split over all four; norms over two.
    split = 12 * plan.parameters / 4
    assert split < plan.memory.parameters + plan.memory.optimizer < 1.01 * split
    assert plan.memory.temporaries > 0
    assert plan.fits
    gathered = {each.shape: each.count for each in plan.collectives if each.kind == "all-gather"}
    assert (
        gathered["bf16[2,256,2,512]"] == 1
    )  # there is memory for both layers: once for all passes
    assert gathered["f32[512,256]"] == 4  # the output matrix, in each pass
    assert plan.memory.total < DEVICES["v5p"].memory
