"""Compiles a training step for an H200 ahead of time, and prints properties of its loops.

`test_layer_passes.py` runs it in a separate process, with the compiler for GPUs on its path.
Nothing is executed and no array is made. Prints JSON:

    zeroed             bytes of stacks over the layers that are filled before a loop fills them
    zeroed_by_default  the same where XLA is not told to leave that out
    gates              kernels that write the gradient of gate and up, [B, T, 2, F]
    padded             paddings of one half of such a gradient to both
"""

import json
import math
import re
from typing import Any

import numpy as np
from jax.sharding import Mesh

from dms_jax import sharding
from dms_jax.config import ModelConfig
from dms_jax.policies import DMS
from dms_jax.training import xla_options
from dms_jax.training.program import program_of_shape
from dms_jax.training.recipe import Recipe, Stage
from tests.support import gpu_compiler
from tests.support.ahead import compile_ahead

LAYERS, BATCH, LENGTH = 3, 2, 512
CONFIG = ModelConfig(
    vocab_size=1024,
    hidden_size=256,
    intermediate_size=640,
    num_layers=LAYERS,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    max_position_embeddings=4096,
    qkv_bias=True,
    tie_embeddings=True,
    model_type="qwen2",
)
GATES = (BATCH, LENGTH, 2, CONFIG.intermediate_size)
_SIZES = {"bf16": 2, "f32": 4}


def step_text(options: dict[str, Any] | None = None) -> str:
    """Returns the compiled step of one H200."""
    devices = gpu_compiler.devices("h200", 1, a_host=1)
    names = (sharding.DATA, sharding.SEQUENCE, sharding.MODEL)
    mesh = Mesh(np.array(devices).reshape(1, 1, 1), names)
    recipe = Recipe(
        name="layers",
        stages=(Stage("ramp", 10, 1e-3, 4.0),),
        sequence_length=LENGTH,
        batch_size=BATCH,
        micro_batch_size=BATCH,
        trainable="all",
        remat="all_but_products",
    )
    policy = DMS(window=16, source="adapter")
    program = program_of_shape(CONFIG, policy, recipe, mesh, "bfloat16")
    return compile_ahead(program.lower(recipe.stages[0]), "h200", options).text


def shape_of(text: str) -> tuple[int, ...]:
    """# In: 2,512  Out: (2, 512)"""
    return tuple(int(size) for size in text.split(",") if size)


def zeroed(text: str) -> int:
    """Returns the bytes of per-layer stacks that broadcasts fill outside of loops."""
    entry = text[text.index("\nENTRY ") :]
    total = 0
    for outputs in re.findall(r"= (.*?) fusion\(\), kind=kLoop, calls=%\S*broadcast", entry):
        for kind, sizes in re.findall(r"(bf16|f32)\[([\d,]+)\]", outputs):
            shape = shape_of(sizes)
            total += _SIZES[kind] * math.prod(shape) * (shape[0] == LAYERS)
    return total


def gates(text: str) -> int:
    """Returns the number of kernels that write the gradient of gate and up."""
    sizes = ",".join(map(str, GATES))
    return len(re.findall(rf"= bf16\[{sizes}\]\S* fusion\(.*kind=k.*transpose\(jvp\(\)\)", text))


def padded(text: str) -> int:
    """Returns how often one half of such a gradient is padded to both."""
    found = re.findall(r"= (?:bf16|f32)\[([\d,]+)\]\S* pad\(", text)
    return sum(shape_of(sizes) == GATES for sizes in found)


if __name__ == "__main__":
    compiled = step_text()
    found = {each.__name__: each(compiled) for each in (zeroed, gates, padded)}
    by_default = step_text(dict.fromkeys(xla_options.ONE_GPU_OPTIONS, False))
    print(json.dumps(found | {"zeroed_by_default": zeroed(by_default)}))
