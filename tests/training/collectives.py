"""Compiles training steps over meshes ahead of time and prints their collectives as JSON.

    python -m tests.training.collectives (cpu | gpu | v5e) DATA[xSEQUENCE[xMODEL]]...

`test_collectives.py` runs it in a separate process: one process loads libtpu at a time, and arrays
can be abstract without run-time type checks. Nothing is executed.

GPUs are H200s, with the compiler of `make gpu-compiler`; TPUs are v5e slices with as many chips, in
two columns.
"""

import collections
import json
import math
import re
import sys
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from dms_jax.config import ModelConfig
from dms_jax.policies import DMS
from dms_jax.sharding import mesh_axes
from dms_jax.training.program import StepProgram, program_of_shape
from dms_jax.training.recipe import Recipe, Stage
from tests.support import gpu_compiler
from tests.support.ahead import compile_ahead

LAYERS, LENGTH, SEQUENCES, PASSES = 3, 256, 2, 2
CONFIG = ModelConfig(
    vocab_size=1024,
    hidden_size=128,
    intermediate_size=384,
    num_layers=LAYERS,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    max_position_embeddings=4096,
    tie_embeddings=True,
    model_type="llama",
)
_SIZES = {"bf16": 2, "f32": 4, "s32": 4, "u32": 4, "pred": 1}
_KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
_COLLECTIVE = re.compile(rf"= (.*?) ({_KINDS})(?:-start)?\(")
_ARRAY = re.compile(r"(bf16|f32|s32|u32|pred)\[([\d,]*)\]")
_TRIPS = re.compile(r'known_trip_count"?:\{"?n"?:"?(\d+)')
_CALLED = re.compile(r"(?:body|to_apply|calls|called_computations)=\{?%([\w.-]+)")


def inputs(program: StepProgram, mesh: Mesh, stage: Stage) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the shapes of the passes of a step of a stage, and of the values of its schedules."""
    recipe, struct = program.recipe, jax.ShapeDtypeStruct
    size = recipe.pass_size(mesh.shape["data"])
    shape = (recipe.batch_of(stage) // size, size, recipe.sequence_length)
    types = dict(tokens=np.int32, loss_mask=np.bool_)
    if recipe.packing == "first_fit":
        types["segment_ids"] = np.int32
    number = struct((), program.number, sharding=program.everywhere)
    key = jax.eval_shape(lambda: jax.random.key(0))
    schedule = dict(
        target=number,
        neuron_scale=number if stage.kind == "neuron_decay" else None,
        learning_rate=number,
        adapter_learning_rate=number,
        key=struct(key.shape, key.dtype, sharding=program.everywhere),
        supervised=number if stage.kind == "supervise" else None,
    )
    place = program.place_of_passes
    return {name: struct(shape, x, sharding=place) for name, x in types.items()}, schedule


def lower(program: StepProgram, mesh: Mesh, stage: Stage) -> Any:
    """Lowers the step of a stage for the devices of its mesh."""
    platform = mesh.devices.flat[0].platform.replace("gpu", "cuda")
    with jax.set_mesh(mesh):
        arguments = program.state, program.constants, *inputs(program, mesh, stage)
        return program.jit().trace(*arguments).lower(lowering_platforms=(platform,))


def compiled_step(mesh: Mesh, target: str) -> str:
    """Compiles a step with the same number of sequences per shard on any mesh."""
    policy = DMS(window=16, source="adapter")
    batch = SEQUENCES * mesh.shape["data"]
    recipe = Recipe(
        name="collectives",
        stages=(Stage("ramp", 10, 1e-3, 4.0),),
        sequence_length=LENGTH,
        batch_size=batch * PASSES,
        micro_batch_size=SEQUENCES,
        trainable="all",
    )
    program = program_of_shape(CONFIG, policy, recipe, mesh, "bfloat16")
    lowered = lower(program, mesh, recipe.stages[0])
    return compile_ahead(lowered, f"{target} {dict(mesh.shape)}").text


def collectives(text: str) -> list[tuple[str, str, int]]:
    """Returns (kind, arrays, times a step) of every collective of a compiled program.

    An asynchronous one on a TPU appears three times, at its start, beside other work and at its
    end: the chain counts once.
    """
    computations, name = collections.defaultdict(list), ""
    entry = ""
    for line in text.splitlines():
        if found := re.match(r"(ENTRY )?%([\w.-]+) \(.*\{$", line):
            name = found[2]
            entry = name if found[1] else entry
        computations[name].append(line)
    results: list[tuple[str, str, int]] = []

    def walk(name: str, times: int, chains: set[tuple[str, ...]]) -> None:
        """Adds results; `chains` are those already seen in this loop body."""
        for line in computations[name]:
            if any(kind in line for kind in _KINDS.split("|")) and (
                found := _COLLECTIVE.search(line)
            ):
                chain = re.search(r'chain_id="(\d+)"', line)
                part = (chain[1], found[2], *_ARRAY.findall(found[1])[-1]) if chain else None
                if part is None or part not in chains:
                    results.append((found[2], found[1], times))
                chains |= {part} if part else set()
            trips = _TRIPS.search(line) if "known_trip_count" in line else None
            often = times * (int(trips[1]) if trips else 1)
            for called in _CALLED.findall(line):
                if called in computations and called != name:
                    walk(called, often, set() if " while(" in line else chains)

    walk(entry, 1, set())
    return results


def moved_bytes(kind: str, arrays: str, data: int) -> int:
    """Returns the bytes of the whole arrays of a collective, without integers (tokens).

    # In: reduce-scatter, f32[64,32], 4                Out: 32768, the compiler shows a shard
    # In: all-gather, ((bf16[8,2]), bf16[8,4]), 2      Out: 64, of what starts it shows both
    """

    def of(text: str) -> int:
        return sum(
            _SIZES[kind] * math.prod(int(n) for n in shape.split(",") if n)
            for kind, shape in _ARRAY.findall(text)
            if kind in ("bf16", "f32")
        )

    if arrays.startswith("(("):
        operands, _, results = arrays.partition("), ")
        return max(of(operands), of(results))
    return of(arrays) * (data if kind == "reduce-scatter" else 1)


def mesh_of(devices, data: int, sequence: int = 1, model: int = 1) -> Mesh:
    sizes = mesh_axes(data, model, sequence=sequence, experts=1)
    shape = tuple(sizes.values())
    devices = np.array(devices[: math.prod(shape)]).reshape(shape)
    return Mesh(devices, tuple(sizes), axis_types=(AxisType.Auto,) * len(shape))


def devices_of(target: str, count: int) -> list:
    """Returns that many devices, abstract ones except on a CPU."""
    if target == "cpu":
        return jax.devices()
    if target == "gpu":
        return gpu_compiler.devices("h200", 8, a_host=8)
    slice_of_two_columns = f"{target}:2x{count // 2}"
    return topologies.get_topology_desc(platform="tpu", topology_name=slice_of_two_columns).devices


if __name__ == "__main__":
    for shards in sys.argv[2:]:
        sizes = [int(size) for size in shards.split("x")]
        mesh = mesh_of(devices_of(sys.argv[1], math.prod(sizes)), *sizes)
        for each in collectives(compiled_step(mesh, sys.argv[1])):
            print(json.dumps((shards, *each)))
