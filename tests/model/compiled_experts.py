"""Compiles the experts of a decode step for an absent H200.

`test_experts.py` runs it in a separate process, with the compiler for GPUs on its path. Nothing is
executed and no array is made. Prints JSON for every way to compute a step: the written arrays as
large as a layer's matrices, and the number of grouped kernels.
"""

import functools
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dms_jax.config import Experts, ModelConfig
from dms_jax.generation.programs import GPU_STEP_OPTIONS
from dms_jax.model import layers
from dms_jax.model.layer_loop import roles, scan_layers, stretches
from dms_jax.model.layers import ExpertMLP
from dms_jax.policies import Vanilla
from tests.support import gpu_compiler
from tests.support.ahead import compile_ahead

CONFIG = ModelConfig(
    vocab_size=1024,
    hidden_size=1024,
    intermediate_size=384,
    num_layers=8,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    max_position_embeddings=4096,
    experts=Experts(16, 4),
    model_type="qwen3_moe",
)
SEQUENCES = 32
MATRIX = 16 * CONFIG.hidden_size * CONFIG.intermediate_size  # numbers of the smaller stack


def step(place: NamedSharding) -> jax.stages.Lowered:
    """Returns the experts of all layers, in turns of four layers, like a step."""
    make = functools.partial(ExpertMLP, CONFIG, stack=(CONFIG.num_layers,), dtype=jnp.bfloat16)
    mlp = jax.eval_shape(lambda: make(rngs=nnx.Rngs(0)))
    x = jax.ShapeDtypeStruct((SEQUENCES, 1, CONFIG.hidden_size), jnp.bfloat16)

    def run(mlp, x):
        each = stretches(roles(CONFIG, Vanilla()), 1)
        body = lambda x, mlp, index, role, own: (x + mlp(x), None)  # noqa: E731
        return scan_layers(body, x, mlp, each, jnp.arange(CONFIG.num_layers), block=4)[0]

    placed = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), (mlp, x)
    )
    return jax.jit(run, compiler_options=GPU_STEP_OPTIONS).lower(*placed)


def written(text: str) -> list[str]:
    """Returns the arrays as large as a layer's matrices that are written outside fusions.

    A cut inside the multiplication writes nothing.
    """
    found = re.findall(r"= bf16\[([\d,]+)\]\S* (?:copy|transpose|fusion)\(.*", text)
    return [sizes for sizes in found if math.prod(map(int, sizes.split(","))) >= MATRIX]


if __name__ == "__main__":
    mesh = Mesh(np.array(gpu_compiler.devices("h200", 1, a_host=1)), ("x",))
    found = {}
    for name, most in {"every": 128, "grouped": 0}.items():
        layers.MOST_OF_A_STEP = most
        text = compile_ahead(step(NamedSharding(mesh, PartitionSpec())), "h200").text
        kernels = text.count('custom_call_target="mosaic_gpu')
        found[name] = {"written": written(text), "kernels": kernels}
    print(json.dumps(found))
