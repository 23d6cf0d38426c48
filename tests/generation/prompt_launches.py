"""Compiles prefill programs for an H200; prints launches and memory as JSON.

    python -m tests.generation.prompt_launches

`test_prompt_programs.py` runs it in a separate process, like `launches.py`. The shape is that of
Qwen2.5-0.5B, with and without padding. Nothing is executed and no array is made.
"""

import json
from unittest import mock

import jax
import jax.numpy as jnp

from dms_jax.config import ModelConfig
from dms_jax.generation import programs
from dms_jax.policies import DMS, Policy, Vanilla
from tests.generation.launches import computations
from tests.laws.compiled_steps import arguments, for_h200
from tests.support.ahead import compile_ahead

LANES, COLUMNS = 256, 16
ENTRIES, WIDTH, PLACES = 48, 256, 4096
CONFIG = ModelConfig(
    vocab_size=151936,
    hidden_size=896,
    intermediate_size=4864,
    num_layers=24,
    num_heads=14,
    num_kv_heads=2,
    head_dim=64,
    max_position_embeddings=4096,
    qkv_bias=True,
    tie_embeddings=True,
    model_type="qwen2",
)
POLICIES = {"Vanilla": Vanilla(), "DMS": DMS(window=64, source="adapter")}


def report(policy: Policy, places: int | None) -> dict:
    """Returns the launches of a layer, the pool's copies and aliasing, and the memory beside it."""
    place = for_h200()
    (device,) = place.mesh.devices.flat
    model, cache, *_ = arguments(policy, CONFIG, batch=LANES, columns=COLUMNS, place=place)

    def given(*shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    table = given(CONFIG.num_layers, ENTRIES, CONFIG.num_kv_heads, COLUMNS)
    of_entries = given(ENTRIES)
    with mock.patch.object(jax, "default_backend", return_value="gpu"):
        lowered = programs.extend.on_gpu.trace(
            *(model, cache, None, table, of_entries, given(ENTRIES, WIDTH), of_entries),
            *(None, policy, True, places),
        ).lower(lowering_platforms=("cuda",))
        compiled = compile_ahead(lowered, device.device_kind)
    lines, loops = computations(compiled.text)
    (layers,) = [each for own in loops.values() for each in own if each[1] == CONFIG.num_layers]
    pool = f"bf16[{','.join(map(str, cache.k_pages.shape))}]"
    return dict(
        launches=len(lines[layers[0]]),
        copies=[
            line[:200]
            for own in lines.values()
            for line in own
            if pool in line and (" copy(" in line or " copy-start(" in line)
        ],
        pool_bytes=2 * cache.k_pages.size * cache.k_pages.dtype.itemsize,
        aliased=compiled.memory.alias_size_in_bytes,
        temporary=compiled.memory.temp_size_in_bytes,
    )


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # leaves a present GPU alone
    print(
        json.dumps(
            {
                name: dict(padded=report(policy, None), unpadded=report(policy, PLACES))
                for name, policy in POLICIES.items()
            }
        )
    )
