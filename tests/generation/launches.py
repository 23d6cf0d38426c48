"""Compiles decode steps for an H200; prints launches and copies of a layer as JSON by policy.

    python -m tests.generation.launches

`test_launches.py` runs it in a separate process, with the compiler for GPUs (`make gpu-compiler`)
on its path, which would slow every start of jax. Nothing is executed and no array is made.
"""

import dataclasses
import json
import re

import jax

from dms_jax.config import ModelConfig
from dms_jax.generation import programs
from dms_jax.policies import DMS, H2O, Policy, Vanilla
from tests.laws.compiled_steps import arguments, for_h200
from tests.support.ahead import compile_ahead

LAYERS, BATCH, COLUMNS = 32, 32, 8  # two turns of the loop over layers
CONFIG = ModelConfig(
    vocab_size=1024,
    hidden_size=1024,
    intermediate_size=2048,
    num_layers=LAYERS,
    num_heads=16,
    num_kv_heads=8,
    head_dim=64,
    max_position_embeddings=4096,
    tie_embeddings=True,
    model_type="llama",
)
POLICIES = {"Vanilla": Vanilla(), "DMS": DMS(window=64), "H2O": H2O(budget=128)}
PAGES = LAYERS * BATCH * CONFIG.num_kv_heads * COLUMNS
# Instructions without a kernel or a copy on the device.
NO_LAUNCH = {"parameter", "tuple", "get-tuple-element", "bitcast", "constant", "copy-done"}
_COMPUTATION = re.compile(r"(?:ENTRY )?%([\w.-]+) \(.*\{$")
_OPERATION = re.compile(r" = (?:\(.*?\)|\S+) ([\w-]+)\(")
_LOOP = re.compile(r" while\(.* body=%([\w.-]+)")
_TRIPS = re.compile(r'known_trip_count"?:\{"?n"?:"?(\d+)')


def compiled_step(policy: Policy, config: ModelConfig) -> str:
    """Returns the text of the program of steps, compiled for an H200."""
    place = for_h200()
    given = arguments(policy, config, batch=BATCH, columns=COLUMNS, place=place)
    traced = programs.decode.on_gpu.trace(*given)
    (device,) = place.mesh.devices.flat
    return compile_ahead(traced.lower(lowering_platforms=("cuda",)), device.device_kind).text


def computations(text: str) -> tuple[dict[str, list[str]], dict[str, list[tuple[str, int]]]]:
    """Returns the launches of each computation, and its loops with body and number of turns."""
    lines: dict[str, list[str]] = {}
    loops: dict[str, list[tuple[str, int]]] = {}
    name = ""
    for line in text.splitlines():
        if found := _COMPUTATION.match(line):
            name = found[1]
            lines[name], loops[name] = [], []
        elif found := _OPERATION.search(line):
            if found[1] not in NO_LAUNCH:
                lines[name].append(line.strip())
            if loop := _LOOP.search(line):
                trips = _TRIPS.search(line)
                assert trips is not None
                loops[name].append((loop[1], int(trips[1])))
    return lines, loops


def layer_loop(text: str) -> tuple[list[str], int]:
    """Returns the kernels and copies of a turn of the loop over layers, and how many turns it has.

    It is the inner loop of the loop over steps.
    """
    lines, loops = computations(text)
    # A body that holds several steps has as many loops over layers.
    body, trips = next(loops[step][0] for each in loops.values() for step, _ in each if loops[step])
    return lines[body], trips


def report(policy: Policy, config: ModelConfig = CONFIG) -> dict[str, float]:
    """Returns the launches of a layer, and the copies of arrays of the pool's size in a turn."""
    lines, trips = layer_loop(compiled_step(policy, config))
    copied = [
        line
        for line in lines
        if f"[{PAGES}," in line and (" copy(" in line or " copy-start(" in line)
    ]
    return dict(launches=len(lines) * trips / LAYERS, copies=len(copied))


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # leaves a present GPU alone
    found = {name: report(policy) for name, policy in POLICIES.items()}
    normed = dataclasses.replace(CONFIG, qk_norm=True, model_type="qwen3")
    print(json.dumps(found | {"norms of queries and keys": report(Vanilla(), normed)}))
