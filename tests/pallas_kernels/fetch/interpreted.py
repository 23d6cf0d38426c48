"""Run fetches in the kernel's interpreter, one JSON line for each case that is right.

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
    """Gather rows, and blocks of which some are none, and check them; races are printed."""
    store = np.random.default_rng(0).normal(size=(240, 128)).astype(np.float32)
    parameters = plgpu.InterpretGPUParams(detect_races=True)
    # Blocks of one copy, of which a program makes one or several, and of two copies.
    for count, block in ((1, 1), (16, 1), (37, 1), (5, 4), (4, 20), (3, 60)):
        index = np.random.default_rng(count).integers(0, 240 // block, count).astype(np.int32)
        index[1::3] = -1 if block > 1 else 0
        given = jnp.asarray(store), jnp.asarray(index)
        rows = fetch_rows_mosaic(*given, block=block, interpret=parameters)
        found = np.asarray(jax.block_until_ready(rows)).reshape(count, block, 128)
        want = store.reshape(-1, block, 128)[index]
        chex.assert_trees_all_equal(found[index >= 0], want[index >= 0])
        print(json.dumps({"count": count, "block": block}), flush=True)


if __name__ == "__main__":
    interpret_quickly()
    main()
