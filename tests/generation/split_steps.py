"""Compiles decode steps with heads split over devices; reports the communication of a step.

    python -m tests.generation.split_steps

`test_split_steps.py` runs it in a separate process with the compiler for GPUs (`make gpu-compiler`)
on its path. It compiles for two absent H200s and prints for some policies the collectives of a step
and the launches of a turn of the layer loop, as JSON. Nothing is executed and no array is made.
"""

import collections
import dataclasses
import json
import re
import tempfile
from pathlib import Path
from unittest import mock

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dms_jax import sharding
from dms_jax.config import ModelConfig
from dms_jax.generation import programs
from dms_jax.generation.sampling import Sampling
from dms_jax.model.caching import cache_specs
from dms_jax.policies import DMS, H2O, AdaKV, Policy, Quest, SnapKV, Vanilla
from tests.generation import launches
from tests.laws.compiled_steps import arguments
from tests.support import gpu_compiler
from tests.training.collectives import collectives

TURN = 9  # layers in each of two turns of the loop over them on a GPU
LAYERS, BATCH, COLUMNS, STEPS, DEVICES = 18, 32, 8, 8, 2
CONFIG = dataclasses.replace(
    launches.CONFIG,
    vocab_size=1152,  # nine blocks of 128
    num_layers=LAYERS,
    qk_norm=True,
    model_type="qwen3",
)
POLICIES: dict[str, Policy] = {
    "Vanilla": Vanilla(),
    "DMS": DMS(window=64),
    "DMS with an adapter": DMS(window=64, source="adapter"),
    "H2O": H2O(budget=128),
    "Quest": Quest(budget=128, dense_layers=0),
    "AdaKV": AdaKV(SnapKV(budget=128, interval=64)),
}
# These are also compiled for GPUs, seven seconds each.
ON_GPUS = ("Vanilla", "DMS", "AdaKV")
# Instructions that contain other launches, or wait for them.
HOLDERS = {"CommandBuffer", "DynamicSliceFusion", "AsyncStart", "AsyncDone", "While", "Conditional"}
GREEDY, TOP_P = Sampling(temperature=0), Sampling(temperature=0.6, top_p=0.95)


def split_arguments(
    policy: Policy, config: ModelConfig, mesh: Mesh, sampling: Sampling, *, batch: int = BATCH
) -> tuple:
    """Returns shapes for a chunk of steps, placed as by `Runner.decode` on a mesh."""
    given = arguments(policy, config, batch=batch, columns=COLUMNS)
    model, cache, host, table, tokens, remaining, seeds, policy, _, _, ends = given

    def placed(x, place):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

    def parameter(param):
        axes, value = param.get_metadata("axes"), param.get_value()
        return param.replace(placed(value, sharding.parameter_sharding(mesh, axes, value.shape)))

    model = jax.tree.map(parameter, model, is_leaf=lambda x: isinstance(x, nnx.Variable))
    with jax.set_mesh(mesh):
        specs = cache_specs(cache, config.num_kv_heads)
    cache = jax.tree.map(lambda x, spec: placed(x, NamedSharding(mesh, spec)), cache, specs)
    tokens = placed(tokens, NamedSharding(mesh, PartitionSpec()))
    return (
        model,
        cache,
        host,
        table,
        tokens,
        remaining,
        seeds,
        policy,
        sampling.filter,
        STEPS,
        ends,
    )


def of_a_step(text: str) -> dict[str, int]:
    """Returns the count of each collective in a step, without those of a whole chunk.

    # Out: {"all-reduce bf16[32,1024]": 64, ...}
    """
    found = collections.Counter()
    for kind, arrays, times in collectives(text):
        if times % STEPS == 0:
            results = arrays.partition("), ")[2] if arrays.startswith("((") else arrays
            found[" ".join([kind, *re.findall(r"\w+\[[\d,]*\]", results)])] += times // STEPS
    return dict(found)


def two_gpus() -> Mesh:
    """Returns a mesh of two absent H200s."""
    devices = np.array(gpu_compiler.devices("h200", DEVICES, a_host=DEVICES))
    return Mesh(devices.reshape(1, DEVICES), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def turn_of(thunks: str) -> list[str]:
    """Returns the kinds of instructions in a turn of the layer loop, inside and outside graphs."""
    lines = thunks.splitlines()
    loops = [place for place, line in enumerate(lines) if line.strip() == "body:"]
    turn, least = [], 0
    for line in lines[loops[1] + 1 :]:
        depth = len(line) - len(line.lstrip())
        if turn and depth < least:
            break
        if kind := re.match(r" *\d+: k(\w+)", line):
            least = least or depth
            turn.append(kind[1])
    return turn


def report(policy: Policy, sampling: Sampling) -> dict:
    """Reports a step on two H200s.

    That is its collectives; how many kernels, copies and collectives a turn of the loop over layers
    has, in a graph or not; and how many of these are sums by XLA's own kernel.
    """
    mesh = two_gpus()
    given = split_arguments(policy, CONFIG, mesh, sampling)
    with (
        jax.set_mesh(mesh),
        mock.patch.object(jax, "default_backend", return_value="gpu"),
        tempfile.TemporaryDirectory() as folder,
    ):
        traced = programs.decode.on_gpu.trace(*given)
        lowered = traced.lower(lowering_platforms=("cuda",))
        compiled = lowered.compile(compiler_options={"xla_dump_to": folder})
        text = compiled.as_text()
        assert text is not None
        (thunks,) = Path(folder).glob("*thunk_sequence_after_thunk_passes.txt")
        turn = turn_of(thunks.read_text())
    return dict(
        collectives=of_a_step(text),
        in_all=sum(kind not in HOLDERS for kind in turn),
        own_sums=turn.count("CollectiveKernel"),
    )


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # leaves a present GPU alone
    found = {name: report(POLICIES[name], GREEDY) for name in ON_GPUS}
    print(json.dumps(found | {"top-p": report(Vanilla(), TOP_P)}))
