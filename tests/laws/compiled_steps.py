"""Compiles steps and prompts ahead of time; prints the compiler's reports as JSON.

`test_compiled_steps.py` runs it in a separate process, for a TPU or, with the argument `h200`, for
a GPU (`make gpu-compiler`): compiling for TPU takes libtpu, which only one process loads at a time.
Nothing is executed and no array is made, so models and pools can have real sizes, and no device is
needed.
"""

import contextlib
import json
import math
import sys
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import dms_jax
from dms_jax.config import ModelConfig
from dms_jax.generation import programs
from dms_jax.generation.sampling import Sampling
from dms_jax.model.cached_attention import in_one_pass
from dms_jax.model.caching import init_cache
from dms_jax.model.transformer import Transformer
from tests.support import gpu_compiler
from tests.support.ahead import compile_ahead

SNAPKV = dms_jax.SnapKV(budget=128, interval=64)
# Steps: one kind of layers, and two with one of two selections; a number by slot, and cuts.
STEPS = {
    "DMS": dms_jax.DMS(window=64),
    "Quest": dms_jax.Quest(budget=128, dense_layers=2),
    "KCache": dms_jax.KCache(),
    "H2O": dms_jax.H2O(budget=128),
    "SnapKV": SNAPKV,
}
# Steps of lanes with a grammar: several on the device, and one with values on the host.
CHECKED = {name: STEPS[name] for name in ("DMS", "KCache")}
# Prompts that are appended and then cut, and prompts with eviction during prefill, in one pass and
# token by token; and one that is only appended.
PROMPTS = {
    "AdaKV": dms_jax.AdaKV(scorer=SNAPKV),
    "DMS": STEPS["DMS"],
    "TOVA": dms_jax.TOVA(budget=128),
    "KCache": STEPS["KCache"],
}
# On GPUs a turn of the layer loop has up to eight layers; there are several turns, of each kind of
# layers if a policy has two.
LAYERS = {"tpu": 4, "gpu": 18}
BATCH, PAGE_SIZE, PAGES_PER_ROW, KV_HEADS, HEAD_DIM = 4, 64, 8, 2, 128
# Ratio of the pool's pages to those of its rows: so large that other memory of a program is
# negligible, and that XLA does not move the pool into a TPU's VMEM.
POOL_FACTOR = 256
PROMPT = 128  # tokens of a chunk of a prompt
TOPOLOGY = "v5p:2x2x1"


def config_of(num_layers: int) -> ModelConfig:
    """Returns a small model with that many layers."""
    return ModelConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=4096,
        qk_norm=True,
        tie_embeddings=True,
        model_type="qwen3",
    )


def arguments(
    policy: dms_jax.Policy,
    config: ModelConfig,
    *,
    batch: int = BATCH,
    columns: int = PAGES_PER_ROW,
    pool_factor: int = 1,
    place: NamedSharding | None = None,
) -> tuple:
    """Returns shapes for a chunk of 8 steps; the pool has `pool_factor` times the rows' pages."""
    table = (config.num_layers, batch, config.num_kv_heads, columns)
    model = jax.eval_shape(
        lambda: Transformer(
            config, adapter=policy.retrofit.adapter, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)
        )
    )
    cache = jax.eval_shape(
        lambda: init_cache(
            config,
            policy,
            num_sequences=batch,
            num_pages=math.prod(table) * pool_factor,
            page_size=PAGE_SIZE,
            dtype=jnp.bfloat16,
        )
    )
    integers = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in (table, (batch,), (batch,))]
    arrays = (model, cache, None, *integers, jax.ShapeDtypeStruct((batch, 2), jnp.uint32))
    if place is not None:
        arrays = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), arrays
        )
    return (*arrays, policy, Sampling(temperature=0).filter, 8, ())


def on_tpu() -> NamedSharding:
    """Returns a sharding on one chip of a TPU topology; no TPU is needed."""
    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGY)
    mesh = Mesh(np.array(topology.devices[:1]).reshape(1, 1), ("data", "model"))
    return NamedSharding(mesh, PartitionSpec())


def for_h200() -> NamedSharding:
    """Returns a sharding on one absent H200."""
    devices = np.array(gpu_compiler.devices("h200", 1, a_host=1))
    return NamedSharding(Mesh(devices.reshape(1, 1), ("data", "model")), PartitionSpec())


def config_on(place: NamedSharding) -> ModelConfig:
    """Returns the model to compile for this target."""
    return config_of(LAYERS[place.mesh.devices.flat[0].platform])


def memory_of(policy, place: NamedSharding) -> dict:
    """Returns the pool's copies, aliasing and memory in a compiled chunk."""
    shapes = arguments(policy, config_on(place), pool_factor=POOL_FACTOR, place=place)
    return report_of(programs.decode.lower(*shapes), shapes, place)


def checked_steps(policy, shapes: tuple, place: NamedSharding) -> Any:
    """Lowers the steps of lanes with a grammar."""
    num_steps = shapes[9] if policy.can_undo else 1
    forced = jax.ShapeDtypeStruct((num_steps, *shapes[5].shape), jnp.int32, sharding=place)
    return programs.decode.lower(*shapes[:9], num_steps, shapes[10], programs.Checks(forced))


def memory_of_checked(policy, place: NamedSharding) -> dict:
    """Returns the same for steps of lanes with a grammar."""
    shapes = arguments(policy, config_on(place), pool_factor=POOL_FACTOR, place=place)
    return report_of(checked_steps(policy, shapes, place), shapes, place)


def memory_of_redraw(policy, place: NamedSharding) -> dict:
    """Returns the same for the program that takes such steps back."""
    shapes = arguments(policy, config_on(place), pool_factor=POOL_FACTOR, place=place)
    model, cache, _, table, tokens, _, seeds, _, rule = shapes[:9]

    def of(x: Any, dtype: Any = None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, dtype or x.dtype, sharding=place)

    trail = jax.tree.map(of, checked_steps(policy, shapes, place).out_info[4])
    masks = of(np.empty((BATCH, -(-model.config.vocab_size // 32))), jnp.int32)
    refused = of(np.empty((3, BATCH)), jnp.int32)
    given = table, trail, trail, tokens, refused, masks, seeds, rule
    lowered = programs.redraw.lower(model.without_layers(), cache, *given)
    return report_of(lowered, (model.without_layers(), *shapes[1:]), place)


def memory_of_prompts(policy, place: NamedSharding) -> dict:
    """Returns the same for the prefill program, in which some prompts end."""
    shapes = arguments(policy, config_on(place), pool_factor=POOL_FACTOR, place=place)

    def of(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    lanes, tokens = of(BATCH), of(BATCH, PROMPT)
    ends = of(BATCH, dtype=bool) if policy.shrinks else None
    static = (policy, in_one_pass(policy, PROMPT, prompt=True), BATCH * PROMPT // 2)
    lowered = programs.extend.lower(*shapes[:4], lanes, tokens, of(BATCH), ends, *static)
    return report_of(lowered, shapes, place)


def report_of(lowered, shapes, place: NamedSharding) -> dict:
    """Returns the pool's copies, aliasing and memory in a compiled program over a cache."""
    device = place.mesh.devices.flat[0]
    report = compile_ahead(lowered, TOPOLOGY if device.platform == "tpu" else device.device_kind)
    pool, lines = shapes[1].k_pages, report.text.splitlines()
    text = f"bf16[{','.join(map(str, pool.shape))}]"
    # `copy` moves an array, `copy-start` does so while other work goes on.
    copies = [
        line.strip()[:200]
        for line in lines
        if text in line and (" copy(" in line or " copy-start(" in line)
    ]
    # On a GPU a layer's matrix that a loop fusion cuts out of the stack is copied; otherwise the
    # cut is part of the multiplication.
    matrices = [leaf for leaf in jax.tree.leaves(shapes[0].layers) if leaf.ndim > 2]
    cut = [f"bf16[1,{','.join(map(str, leaf.shape[1:]))}]" for leaf in matrices]
    weights = [
        line.strip()[:200]
        for line in lines
        if "kind=kLoop" in line and any(each in line.partition(" fusion(")[0] for each in cut)
    ]
    return dict(
        pool_bytes=2 * pool.size * pool.dtype.itemsize,
        aliased=report.memory.alias_size_in_bytes,
        temporary=report.memory.temp_size_in_bytes,
        slot_numbers=sum(
            leaf.size * leaf.dtype.itemsize
            for leaf in jax.tree.leaves(shapes[1].page_state)
            if leaf.shape[1:] == (PAGE_SIZE,)
        ),
        copies=copies,
        copied_weights=weights,
    )


def main() -> None:
    jax.config.update("jax_platforms", "cpu")  # leaves a present GPU alone
    on_gpu = sys.argv[1:] == ["h200"]
    place = for_h200() if on_gpu else on_tpu()
    programs_of = {
        "steps": (memory_of, STEPS),
        "checked": (memory_of_checked, CHECKED),
        "redraw": (memory_of_redraw, {"DMS": STEPS["DMS"]}),
        "prompts": (memory_of_prompts, PROMPTS),
    }
    backend = mock.patch.object(jax, "default_backend", return_value="gpu")
    with backend if on_gpu else contextlib.nullcontext():
        reports = {
            program: {name: of(policy, place) for name, policy in policies.items()}
            for program, (of, policies) in programs_of.items()
        }
    print(json.dumps(reports))


if __name__ == "__main__":
    main()
