"""Run fetches in the kernel's interpreter, one JSON line for each number of rows that is right.

The interpreter runs threads of its own and can stop for ever, so tests run it here, in a process
that can be ended.
"""

import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fetch.gpu import fetch_rows_mosaic


def main():
    """Gather 1, 16 and 37 rows, check them, and say whether memory was raced for."""
    store = np.random.default_rng(0).normal(size=(50, 128)).astype(np.float32)
    parameters = plgpu.InterpretGPUParams(detect_races=True)
    for count in (1, 16, 37):
        index = np.random.default_rng(count).integers(0, 50, count).astype(np.int32)
        rows = fetch_rows_mosaic(jnp.asarray(store), jnp.asarray(index), interpret=parameters)
        chex.assert_trees_all_equal(jax.block_until_ready(rows), store[index])
        raced = bool(interpreter.get_races().races_found)
        print(json.dumps({"count": count, "raced": raced}), flush=True)


if __name__ == "__main__":
    main()
