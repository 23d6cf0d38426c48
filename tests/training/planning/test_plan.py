"""Plans: memory and seconds from known figures, and one compiled for a TPU."""

import dataclasses
import importlib.util
from typing import Any

import jax
import pytest

import dms_jax
from dms_jax.config import ModelConfig
from dms_jax.devices import DEVICES
from dms_jax.errors import ConfigError
from dms_jax.policies import DMC
from dms_jax.training import recipes
from dms_jax.training.planning import (
    Machine,
    Memory,
    Plan,
    StagePlan,
    api,
    find_machine,
    gpu_compiler,
    machines,
)
from dms_jax.training.recipe import Stage
from tests.training.tiny import ADAPTER, NEURON, language_model, recipe

RECIPE = recipes.dms_paper(4)
MEMORY = Memory(10e9, 20e9, 5e9, 10e9, 3e9, 7e9)


def staged(kind="ramp", steps=300, passes=128, **changes) -> StagePlan:
    options: dict[str, Any] = dict(
        memory=MEMORY,
        operations=8 * 989e12,
        model_operations=0.8 * 8 * 989e12,
    )
    return StagePlan(kind, steps, passes, **(options | changes))


def planned(machine="8xh200", recipe=RECIPE, stages=None, **of_all) -> Plan:
    """A plan of two stages, with some figures of both of them changed."""
    if stages is None:
        stages = (staged("neuron_decay", 2000, **of_all), staged(**of_all))
    return Plan(find_machine(machine), (8, 1), recipe, NEURON, 8_000_000_000, stages)


def test_seconds():
    plan = planned()
    assert plan.step_seconds(plan.stages[0]) == pytest.approx(2)  # at half of the peak
    assert plan.run_seconds == pytest.approx(2 * 2300)


def test_every_stage_counts_by_itself():
    """The first takes the most memory, the second the most time, a third is like the second."""
    wide = dataclasses.replace(MEMORY, temporaries=100e9)
    small = staged("neuron_decay", 2000, 32, memory=wide, operations=2 * 989e12)
    plan = planned(stages=(small, staged(steps=1000), staged("train", 100)))
    assert plan.memory == wide
    assert not plan.fits
    assert plan.run_seconds == pytest.approx(2000 * 0.5 + 1100 * 2)
    text = str(plan)
    for line in (
        "A step: 32 or 128 passes of 8",
        "Memory a device, GB (in neuron_decay, which takes the most)",
        "together                                        148.00",
        "Less takes micro_batch_size=1",
        "A step of neuron_decay (estimated): 0.5 seconds",
        "A step of train (estimated): 2.0 seconds",
    ):
        assert line in text


def test_a_plan_that_fits_is_told_without_advice(monkeypatch):
    monkeypatch.setattr(gpu_compiler, "compiles_for", lambda kind: False)
    plan = planned()
    assert plan.fits
    text = str(plan)
    for line in (
        "8.0B parameters, DMS(window=3",
        "On 8 h200 (8xh200): data 8, model 1",
        "2,300 optimizer steps (2,000 of neuron_decay, 300 of ramp), 9.65B tokens",
        "A step: 128 passes of 8 sequences of 4,096 tokens",
        "Estimated: the program is that of v5p:2x2x2 (TPU)",
        "together                                         55.00",
        "of h200: fits",
        "A step of ramp (estimated): 2.0 seconds, 2,097,152 tokens/s, 40% of the peak",
        "1.3 hours, 10 device-hours",
        "run at 50% of the peak: an H200 was measured at 46% to 58%",
        "What devices send to each other is not counted",
    ):
        assert line in text
    assert "Less takes" not in text
    assert "not counted" not in str(planned("h200"))
    assert "Estimated" not in str(planned("v5p-16")).splitlines()[4]
    monkeypatch.setattr(gpu_compiler, "compiles_for", lambda kind: True)
    assert "Estimated: the program" not in str(plan)


def test_a_program_that_was_refused_is_told():
    text = str(planned(memory=dataclasses.replace(MEMORY, temporaries=300e9, exact=False)))
    assert "DOES NOT FIT" in text
    assert "refused the program" in text


@pytest.mark.parametrize(
    ("message", "temporaries"),
    [
        ("Ran out of memory in memory space hbm. Used 120.50G of 95.74G hbm.", 20.5 * 2**30),
        (
            "Ran out of memory on HBM, the total memory required for HLO temporaries (109.82G) "
            "exceeds available HBM (95.73G). HLO module: jit_by_path.",
            109.82 * 2**30,
        ),
        ("Internal error", None),
    ],
)
def test_what_a_compiler_asks_for_when_it_refuses(message, temporaries):
    assert api._asked_for(message, 100.0 * 2**30) == temporaries


def test_what_cannot_be_planned_is_refused():
    config = ModelConfig(64, 32, 64, 2, 4, 2, 8, 64)
    with pytest.raises(ConfigError, match="There is no machine 'h300'"):
        dms_jax.plan(config, ADAPTER, recipe=RECIPE, machine="h300")
    with pytest.raises(ConfigError, match="8 devices, which model_shards=3 does not divide"):
        dms_jax.plan(config, ADAPTER, recipe=RECIPE, machine="8xh200", model_shards=3)
    options = dict(model_shards=2, expert_shards=8)
    with pytest.raises(ConfigError, match=r"model_shards=2 times expert_shards=8 does not divide"):
        dms_jax.plan(config, ADAPTER, recipe=RECIPE, machine="8xh200", **options)


def test_a_program_is_compiled_for_each_stage_that_has_its_own(monkeypatch):
    """The decay of the neuron, ramps of two batch sizes, and the steps after them."""
    stages = (
        Stage("neuron_decay", 2, 1e-3),
        Stage("ramp", 3, 1e-3, 2.0),
        Stage("ramp", 4, 1e-3, 4.0, batch_size=16),
        Stage("train", 5, 1e-3),
    )
    made = recipe(*stages, batch_size=8, micro_batch_size=2)
    compiled = []

    def compile_one(step, inputs, *_):
        compiled.append(inputs)
        return dataclasses.replace(MEMORY, temporaries=1e9 * len(compiled))

    monkeypatch.setattr(api, "_compile", compile_one)
    monkeypatch.setattr(Machine, "devices", lambda self: jax.devices()[: self.count])
    plan = dms_jax.plan(language_model().config, DMC(window=4), recipe=made, machine="4xh200")
    assert [stage.memory.temporaries for stage in plan.stages] == [1e9, 2e9, 3e9, 2e9]
    assert [stage.passes for stage in plan.stages] == [1, 1, 2, 1]
    assert len({stage.operations for stage in plan.stages}) == 2
    assert plan.memory.temporaries == 3e9


def test_a_stage_that_supervises_runs_no_backward_pass_through_layers(monkeypatch):
    monkeypatch.setattr(api, "_compile", lambda *_: MEMORY)
    monkeypatch.setattr(Machine, "devices", lambda self: jax.devices()[: self.count])
    stages = (Stage("supervise", 2, 1e-3), Stage("ramp", 2, 1e-3, 2.0))
    made = recipe(*stages, trainable="adapter")
    plan = dms_jax.plan(language_model().config, ADAPTER, recipe=made, machine="h200")
    # Forward against forward, backward through frozen layers, and the teacher's forward; with
    # the output matrix.
    supervised, ramp = (stage.model_operations for stage in plan.stages)
    assert supervised < ramp / 3


@pytest.mark.nightly
def test_gpus_that_are_here_compile_for_themselves(monkeypatch):
    """CPU devices stand for them."""
    monkeypatch.setattr(machines, "data_sheet", lambda kind: DEVICES["h200"])
    made = recipe(Stage("train", 2, 1e-3), loss="language_modeling")
    config = language_model().config
    plan = dms_jax.plan(config, recipe=made, machine="h200", here=True)
    assert plan.here
    assert plan.memory.exact
    assert plan.memory.temporaries > 0
    assert plan.memory.parameters == pytest.approx(4 * plan.parameters, rel=1e-3)
    assert "Estimated: the program" not in str(plan)
    with pytest.raises(ConfigError, match=r"16xh200.*there are 8 of them here"):
        dms_jax.plan(config, recipe=made, machine="16xh200", here=True)
    with pytest.raises(ConfigError, match=r"v5p-16.*there are 0 of them here"):
        dms_jax.plan(config, recipe=made, machine="v5p-16", here=True)


@pytest.mark.nightly
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
    (stage,) = plan.stages
    assert (stage.kind, stage.steps, stage.passes) == ("train", 10, 4)
    # Every matrix is split over all four; norms over two.
    split = 12 * plan.parameters / 4
    assert split < plan.memory.parameters + plan.memory.optimizer < 1.01 * split
    assert plan.memory.temporaries > 0
    assert plan.fits
    assert plan.memory.total < DEVICES["v5p"].memory
