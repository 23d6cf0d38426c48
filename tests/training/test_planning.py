"""Plans: machines by name, memory and seconds from known figures, and a step compiled for a TPU."""

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
from dms_jax.sharding import make_mesh
from dms_jax.training import planning, recipes
from dms_jax.training.machines import Machine, find_machine
from dms_jax.training.planning import Memory, Plan, StagePlan, bytes_a_device
from dms_jax.training.program import program_of_shape
from dms_jax.training.recipe import Stage
from tests.training.tiny import ADAPTER, NEURON, language_model, recipe

RECIPE = recipes.dms_paper(4)
MEMORY = Memory(10e9, 20e9, 5e9, 20e9)


def planned(machine="8xh200", stages=None) -> Plan:
    """A plan of a decay and a ramp, which fits."""
    if stages is None:
        stages = tuple(
            StagePlan(kind, steps, 128, MEMORY, seconds=2.0)
            for kind, steps in (("neuron_decay", 2000), ("ramp", 300))
        )
    mesh = {"data": 8, "model": 1}
    return Plan(find_machine(machine), mesh, RECIPE, NEURON, 8_000_000_000, stages)


@pytest.mark.parametrize(
    ("name", "kind", "count", "topology"),
    [
        ("v5p-128", "v5p", 64, "v5p:4x4x4"),  # the type counts cores, two a chip
        ("v5p-8", "v5p", 4, "v5p:2x2x1"),
        ("v5p-384", "v5p", 192, "v5p:4x8x8"),  # on the first 192 of 256
        ("v5p-8192", "v5p", 4096, "v5p:16x16x16"),
        ("v6e-8", "v6e", 8, "v6e:2x4"),
        ("v5litepod-16", "v5e", 16, "v5e:4x4"),
        ("v5e-1", "v5e", 1, "v5e:2x2"),
        ("3xv5p", "v5p", 3, "v5p:2x2x1"),  # a number of chips, of no slice
        ("32 x H200", "h200", 32, "v5p:2x4x4"),
        ("h100", "h100", 1, "v5p:2x2x1"),
        ("24xh100", "h100", 24, "v5p:2x4x4"),  # on the first 24 of 32
    ],
)
def test_machines_are_parsed(name, kind, count, topology):
    machine = find_machine(name)
    assert (machine.kind, machine.count, machine.topology) == (kind, count, topology)
    assert machine.is_tpu == kind.startswith("v")


@pytest.mark.parametrize(
    "name",
    ["h300", "0xh200", "", "h200-x", "h200-8", "v4-8", "v5p-3", "v6e-0", "v5p-12288", "4097xv5p"],
)
def test_unknown_machines_are_refused(name):
    with pytest.raises(ConfigError, match=r"There is no machine .* up to 4096, of .* h200"):
        find_machine(name)


def test_every_stage_is_planned_separately():
    """The first stage takes the most memory, the second the most time."""
    wide = dataclasses.replace(MEMORY, temporaries=113e9)
    small = StagePlan("neuron_decay", 2000, 32, wide, seconds=0.5)
    plan = planned(stages=(small, StagePlan("ramp", 1000, 1, MEMORY, seconds=2.0)))
    assert (plan.memory, plan.fits) == (wide, False)
    assert plan.seconds == 2000 * 0.5 + 1000 * 2
    for line in (
        "together                                    148.00",
        "of h200: DOES NOT FIT",
        "These take less memory: `micro_batch_size=1`",
        "2,000 steps of neuron_decay: 0.5 seconds each of 32 passes\n",
        "1,000 steps of ramp: 2.0 seconds each\n",
    ):
        assert line in str(plan)


def test_report_of_a_fitting_plan():
    plan = planned()
    assert plan.fits
    for line in (
        "8.0B parameters, DMS(window=3",
        "On 8 h200 (8xh200): data 8, model 1",
        "Estimated from a TPU's program (v5p:2x2x2): memory may be a quarter less",
        "together                                     55.00",
        "of h200: fits",
        "the run, 9.65B tokens: 1.3 hours, 10 device-hours",
    ):
        assert line in str(plan)
    assert "less memory" not in str(plan)
    assert "TPU's program" not in str(planned("v5p-16"))


@pytest.mark.parametrize(
    ("message", "asked"),
    [
        ("Ran out of memory in memory space hbm. Used 120.50G of 95.74G hbm.", 120.5 * 2**30),
        (
            "Ran out of memory on HBM, the total memory required for HLO temporaries (109.82G) "
            "exceeds available HBM (95.73G). HLO module: jit_by_path.",
            109.82 * 2**30,
        ),
        ("Internal error", None),
    ],
)
def test_memory_in_compiler_errors_is_the_total(message, asked, monkeypatch):
    def refuse(stage):
        raise jax.errors.JaxRuntimeError(message)

    made = recipe()
    program = program_of_shape(language_model().config, ADAPTER, made, make_mesh(1, 1), "float32")
    monkeypatch.setattr(program, "lower", refuse)
    if asked is None:
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            planning._memory(program, made.stages[0])
    else:
        memory = planning._memory(program, made.stages[0])
        assert memory.refused
        assert memory.total == asked


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(machine="h300"), "There is no machine 'h300'"),
        (dict(model_shards=3), "8 devices, which `model_shards=3` does not divide"),
        (
            dict(model_shards=2, expert_shards=8),
            "`model_shards=2` times `expert_shards=8` does not",
        ),
    ],
)
def test_impossible_plans_are_refused(options, message):
    config = language_model().config
    with pytest.raises(ConfigError, match=message):
        dms_jax.plan(config, ADAPTER, recipe=RECIPE, **dict(machine="8xh200") | options)


@pytest.fixture
def compiled(monkeypatch):
    """Returns the stages whose steps were compiled, for CPUs and without a compiler."""
    stages = []

    def memory(program, stage):
        stages.append(stage)
        return dataclasses.replace(MEMORY, temporaries=1e9 * len(stages))

    monkeypatch.setattr(planning, "_memory", memory)
    monkeypatch.setattr(Machine, "devices", lambda self: jax.devices()[: self.count])
    return stages


def test_stages_with_equal_steps_share_a_program(compiled):
    """The decay of the neuron, ramps of two batch sizes, and the steps after them."""
    stages = (
        Stage("neuron_decay", 2, 1e-3),
        Stage("ramp", 3, 1e-3, 2.0),
        Stage("ramp", 4, 1e-3, 4.0, batch_size=16),
        Stage("train", 5, 1e-3),
    )
    made = recipe(*stages, batch_size=8, micro_batch_size=2)
    plan = dms_jax.plan(language_model().config, DMC(window=4), recipe=made, machine="4xh200")
    assert compiled == list(stages[:3])
    assert [stage.memory.temporaries for stage in plan.stages] == [1e9, 2e9, 3e9, 2e9]
    assert [stage.passes for stage in plan.stages] == [1, 1, 2, 1]
    assert plan.stages[2].seconds == 2 * plan.stages[1].seconds
    assert plan.mesh == {"data": 4, "model": 1}


@pytest.mark.usefixtures("compiled")
def test_a_supervised_stage_runs_no_backward_pass_through_layers():
    made = recipe(Stage("supervise", 2, 1e-3), Stage("ramp", 2, 1e-3, 2.0), trainable="adapter")
    plan = dms_jax.plan(language_model().config, ADAPTER, recipe=made, machine="h200")
    # Forward against forward, backward through frozen layers, and the teacher's forward; with
    # the output matrix.
    supervised, ramp = (stage.seconds for stage in plan.stages)
    assert supervised < ramp / 3


def test_device_bytes_equal_its_shards():
    program = program_of_shape(
        language_model().config, ADAPTER, recipe(), make_mesh(2, 2), "float32"
    )
    # Parameters, two moments of each, and two counters.
    assert bytes_a_device(program.state) == 3 * bytes_a_device(program.parameters) + 8
    kernel = program.parameters["layers.mlp.down_proj.kernel"]  # [L, F, E]
    assert bytes_a_device(kernel) == 2 * 24 * 16 * 4 / 4


@pytest.mark.nightly
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_a_step_is_compiled_for_a_slice():
    config = ModelConfig(512, 256, 512, 2, 4, 2, 128, 512)
    options: dict[str, Any] = dict(sequence_length=128, batch_size=8, micro_batch_size=1)
    made = dataclasses.replace(
        recipes.pretraining(10), packing="concatenate", unroll=False, **options
    )
    plan = dms_jax.plan(config, recipe=made, machine="v5p-8", model_shards=2)
    assert plan.mesh == {"data": 2, "model": 2}
    (stage,) = plan.stages
    assert (stage.kind, stage.steps, stage.passes) == ("train", 10, 4)
    # Every matrix is split over all four; norms over two.
    split = 12 * plan.parameters / 4
    assert split < plan.memory.parameters + plan.memory.optimizer < 1.01 * split
    assert plan.memory.temporaries > 0
    assert plan.fits
    assert plan.memory.total < DEVICES["v5p"].memory
