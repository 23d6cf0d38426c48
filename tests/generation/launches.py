"""Compiles decode steps for an H200 and prints what a layer launches, as JSON by policy.

    python -m tests.generation.launches

Run by `test_launches.py` in a process of its own, with the compiler for GPUs (`make gpu-compiler`)
on its path, which would slow every start of jax. Nothing is executed and no array is made.
"""

import json
import re
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dms_jax.config import ModelConfig
from dms_jax.generation import programs
from dms_jax.generation.sampling import Sampling
from dms_jax.model.caching import init_cache
from dms_jax.model.transformer import Transformer
from dms_jax.policies import DMS, Policy, Vanilla
from dms_jax.training.planning import gpu_compiler
from tests.support.ahead import compile_ahead

LAYERS, BATCH, PAGE_SIZE, COLUMNS = 16, 32, 64, 8
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
POLICIES = {"Vanilla": Vanilla(), "DMS": DMS(window=64)}
# What a program does without a kernel or a copy on the device.
NO_LAUNCH = {"parameter", "tuple", "get-tuple-element", "bitcast", "constant", "copy-done"}
_COMPUTATION = re.compile(r"(?:ENTRY )?%([\w.-]+) \(.*\{$")
_OPERATION = re.compile(r" = (?:\(.*?\)|\S+) ([\w-]+)\(")
_LOOP = re.compile(r" while\(.* body=%([\w.-]+)")
_TRIPS = re.compile(r'known_trip_count"?:\{"?n"?:"?(\d+)')


def compiled_step(policy: Policy) -> str:
    """Returns the text of the program of steps, as it would run on an H200."""
    (device,) = gpu_compiler.devices("h200", 1, a_host=1)
    place = NamedSharding(Mesh(np.array([[device]]), ("data", "model")), PartitionSpec())
    rows = LAYERS * BATCH * CONFIG.num_kv_heads
    model = jax.eval_shape(lambda: Transformer(CONFIG, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    cache = jax.eval_shape(
        lambda: init_cache(
            CONFIG,
            policy,
            num_sequences=BATCH,
            num_pages=rows * COLUMNS,
            page_size=PAGE_SIZE,
            dtype=jnp.bfloat16,
        )
    )
    table = (LAYERS, BATCH, CONFIG.num_kv_heads, COLUMNS)
    integers = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in (table, (BATCH,), (BATCH,))]
    arrays = (model, cache, None, *integers, jax.ShapeDtypeStruct((BATCH, 2), jnp.uint32))
    arrays = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), arrays)
    given = (*arrays, policy, Sampling(temperature=0).filter, 8, ())
    traced = programs.decode.on_gpu.trace(*given)
    return compile_ahead(traced.lower(lowering_platforms=("cuda",)), device.device_kind).text


def launches_a_layer(text: str, num_layers: int) -> float:
    """Returns the kernels and copies of a layer in a compiled program of steps.

    The loop over layers is the one inside the loop over steps.
    """
    operations: dict[str, list[str]] = {}
    loops: dict[str, list[tuple[str, int]]] = {}
    name = ""
    for line in text.splitlines():
        if found := _COMPUTATION.match(line):
            name = found[1]
            operations[name], loops[name] = [], []
        elif found := _OPERATION.search(line):
            operations[name].append(found[1])
            if loop := _LOOP.search(line):
                trips = _TRIPS.search(line)
                assert trips is not None
                loops[name].append((loop[1], int(trips[1])))

    def inner() -> Iterator[tuple[str, int]]:
        bodies = [body for each in loops.values() for body, _ in each]
        for body in bodies:
            # A body that holds several copies of a step has as many loops over layers.
            yield from loops[body][:1]

    (layers,) = {
        sum(operation not in NO_LAUNCH for operation in operations[body]) * trips
        for body, trips in inner()
    }
    return layers / num_layers


if __name__ == "__main__":
    found = {name: launches_a_layer(compiled_step(each), LAYERS) for name, each in POLICIES.items()}
    print(json.dumps(found))
