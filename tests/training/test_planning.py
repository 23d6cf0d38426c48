"""Plans: machines by name, memory beside measured steps, seconds by hand, and the report."""

import dataclasses
from typing import Any

import pytest

import dms_jax
from dms_jax.command_line.shapes import SHAPES
from dms_jax.config import ModelConfig
from dms_jax.errors import ConfigError
from dms_jax.policies import DMC, DMS
from dms_jax.sharding import make_mesh
from dms_jax.training import recipes
from dms_jax.training.planning import Memory, Plan, StagePlan, bytes_a_device, find_machine
from dms_jax.training.program import program_of_shape
from dms_jax.training.recipe import Recipe, Stage
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
    ("name", "kind", "count"),
    [
        ("v5p-128", "v5p", 64),  # the type counts cores, two a chip
        ("v6e-8", "v6e", 8),
        ("v5litepod-16", "v5e", 16),
        ("3xv5p", "v5p", 3),  # a number of chips, of no slice
        ("32 x H200", "h200", 32),
        ("h100", "h100", 1),
    ],
)
def test_machines_are_parsed(name, kind, count):
    machine = find_machine(name)
    assert (machine.kind, machine.count) == (kind, count)


@pytest.mark.parametrize(
    "name", ["h300", "0xh200", "", "h200-x", "h200-8", "v4-8", "v5p-3", "v6e-0"]
)
def test_unknown_machines_are_refused(name):
    with pytest.raises(ConfigError, match=r"There is no machine .* number of devices .* h200"):
        find_machine(name)


QWEN = ModelConfig(
    *(151936, 896, 4864, 24, 14, 2, 64, 32768),
    qkv_bias=True,
    tie_embeddings=True,
    model_type="qwen2",
)
SMALL, LARGE = SHAPES["llama-3.2-1b"], SHAPES["llama-3.1-8b"]
LONG = dict(length=32768, sequences=1, remat="all_but_attention")


@pytest.mark.parametrize(
    ("shape", "options", "measured"),
    [
        (QWEN, dict(length=2048, sequences=8, packing="first_fit"), 21.6),
        (SMALL, dict(length=4096, sequences=4), 38.3),
        (SMALL, dict(length=4096, sequences=8), 53.2),
        (LARGE, dict(length=8192, sequences=1, trainable="adapter"), 44.8),
        (SMALL, LONG, 32.1),
        (SMALL, LONG | dict(sequence=2), 19.2),
        (SMALL, LONG | dict(length=65536, sequence=2), 23.4),
        (SMALL, dict(length=4096, sequences=4, data=2), 31.7),
        (LARGE, dict(length=4096, sequences=1, data=2), 87.5),
    ],
)
def test_memory_is_within_a_tenth_of_measured_steps(shape, options, measured):
    """GB at the peak of an H200's step (experiments/results/training)."""
    given: dict[str, Any] = dict(trainable="all", remat="auto", data=1, sequence=1) | options
    length, sequences, data, sequence = (
        given.pop(name) for name in ("length", "sequences", "data", "sequence")
    )
    made = Recipe(
        "measured",
        (Stage("ramp", 10, 1e-5, 4.0),),
        sequence_length=length,
        batch_size=sequences * data,
        micro_batch_size=sequences,
        **given,
    )
    policy = DMS(window=16, source="adapter")
    found = dms_jax.plan(
        shape, policy, recipe=made, machine=f"{data * sequence}xh200", sequence_shards=sequence
    )
    assert found.memory.total == pytest.approx(1e9 * measured, rel=0.1)


@pytest.mark.parametrize(
    ("model", "ratio", "machine", "shards", "compiled"),
    [
        ("qwen-r1-32b", 4, "v5p-128", 1, 44.6),
        ("qwen-r1-32b", 4, "8xh200", 1, 121.5),
        ("qwen-r1-32b", 4, "32xh200", 1, 56.3),
        ("llama-3.1-70b", 4, "v6e-256", 4, 24.9),
    ],
)
def test_memory_of_large_meshes_is_at_most_a_quarter_below_xla(
    model, ratio, machine, shards, compiled
):
    """GB of XLA's programs (experiments/results/training/planning.md)."""
    paper = dict(model=model) if model.startswith("qwen") else {}
    made = recipes.dms_paper(ratio, **paper)
    found = dms_jax.plan(
        SHAPES[model], DMS(window=16), recipe=made, machine=machine, model_shards=shards
    )
    assert 0.74 < found.memory.total / 1e9 / compiled < 1


def test_every_stage_is_planned_separately():
    """The first stage takes the most memory, the second the most time."""
    wide = dataclasses.replace(MEMORY, temporaries=113e9)
    small = StagePlan("neuron_decay", 2000, 32, wide, seconds=0.5)
    plan = planned(stages=(small, StagePlan("ramp", 1000, 1, MEMORY, seconds=2.0)))
    assert (plan.memory, plan.fits) == (wide, False)
    assert plan.seconds == 2000 * 0.5 + 1000 * 2
    for line in (
        "together                                    148.00",
        "of h200: DOES NOT FIT 80%",
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
        "together                                     55.00",
        "of h200: fits",
        "the run, 9.65B tokens: 1.3 hours, 10 device-hours",
    ):
        assert line in str(plan)
    assert "less memory" not in str(plan)


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


def test_stages_differ_in_passes_and_recomputation():
    """Ramps of two batch sizes; a step that attention teaches runs forward once, and alone."""
    stages = (
        Stage("neuron_decay", 2, 1e-3),
        Stage("ramp", 3, 1e-3, 2.0),
        Stage("ramp", 4, 1e-3, 4.0, batch_size=16),
    )
    made = recipe(*stages, batch_size=8, micro_batch_size=2)
    plan = dms_jax.plan(language_model().config, DMC(window=4), recipe=made, machine="4xh200")
    assert [stage.passes for stage in plan.stages] == [1, 1, 2]
    assert plan.stages[2].seconds == 2 * plan.stages[1].seconds
    assert plan.stages[2].memory.temporaries > plan.stages[1].memory.temporaries
    assert plan.mesh == {"data": 4, "model": 1}
    made = recipe(Stage("supervise", 2, 1e-3), Stage("ramp", 2, 1e-3, 2.0), trainable="adapter")
    plan = dms_jax.plan(language_model().config, ADAPTER, recipe=made, machine="h200")
    # Forward against forward, backward through frozen layers, and the teacher's forward; with
    # the output matrix.
    supervised, ramp = plan.stages
    assert supervised.seconds < ramp.seconds / 3
    assert supervised.memory.total < ramp.memory.total


def test_device_bytes_equal_its_shards():
    program = program_of_shape(
        language_model().config, ADAPTER, recipe(), make_mesh(2, 2), "float32"
    )
    # Parameters, two moments of each, and two counters.
    assert bytes_a_device(program.state) == 3 * bytes_a_device(program.parameters) + 8
    kernel = program.parameters["layers.mlp.down_proj.kernel"]  # [L, F, E]
    assert bytes_a_device(kernel) == 2 * 24 * 16 * 4 / 4
