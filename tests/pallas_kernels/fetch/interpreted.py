"""Run fetches in the kernel's interpreter, one JSON line for each number of rows that is right.

The interpreter runs threads of its own and can stop for ever, so tests run it here, in a process
that can be ended.
"""

import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fetch.gpu import fetch_rows_mosaic
from tests.pallas_kernels.support import interpret_quickly


def main():
    """Gather 1, 16 and 37 rows and check them; races are printed."""
    store = np.random.default_rng(0).normal(size=(50, 128)).astype(np.float32)
    parameters = plgpu.InterpretGPUParams(detect_races=True)
    for count in (1, 16, 37):
        index = np.random.default_rng(count).integers(0, 50, count).astype(np.int32)
        rows = fetch_rows_mosaic(jnp.asarray(store), jnp.asarray(index), interpret=parameters)
        chex.assert_trees_all_equal(jax.block_until_ready(rows), store[index])
        print(json.dumps({"count": count}), flush=True)


if __name__ == "__main__":
    interpret_quickly()
    main()
