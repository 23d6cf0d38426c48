"""Compiles received attention for an H200, and reports the arrays of the program.

    python tests/policies/received_weights.py

The last line is JSON: the dimensions of every array with an element per query and slot, outermost
first. It runs in a separate process with the compiler for GPUs.
"""

import json
import math
import re

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from dms_jax.policies.received import received_weights
from tests.support import gpu_compiler
from tests.support.ahead import compile_ahead

BATCH, HEADS, QUERIES, GROUP, SLOTS, HEAD_DIM = 4, 2, 8, 7, 1344, 64
ARRAY = re.compile(r"f32\[([\d,]+)\]\{([\d,]+)\}")


def main() -> None:
    """Prints the arrays."""
    (device,) = gpu_compiler.devices("h200", 1, a_host=8)
    own = SingleDeviceSharding(device)

    def array(*shape: int, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=own)

    lowered = jax.jit(received_weights).lower(
        array(BATCH, HEADS, QUERIES, GROUP, HEAD_DIM),
        array(BATCH, HEADS, SLOTS, HEAD_DIM),
        array(BATCH, HEADS, QUERIES, SLOTS, dtype=jnp.bool_),
        0.125,
    )
    text = compile_ahead(lowered, "h200").text
    entry = text[text.index("ENTRY") :]  # values inside a kernel take no memory
    found = set()
    for shape, layout in ARRAY.findall(entry):
        sizes = [int(size) for size in shape.split(",")]
        if math.prod(sizes) == BATCH * HEADS * QUERIES * GROUP * SLOTS:
            found.add(tuple(sizes[int(axis)] for axis in reversed(layout.split(","))))
    print(json.dumps(sorted(found)))


if __name__ == "__main__":
    main()
