"""Run selections in the kernel's interpreter, one JSON line for each case that is right.

The interpreter runs threads of its own and can stop for ever, so tests run it here, in a process
that can be ended. Usage: interpreted.py CASE...
"""

import json
import sys

import chex
import jax
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.select import cases
from pallas_kernels.select.gpu import select_largest_mosaic
from tests.pallas_kernels.select_largest.support import KINDS, draw, oracle
from tests.pallas_kernels.support import interpret_quickly


def main(names):
    """Run the cases and check them; races are printed."""
    parameters = plgpu.InterpretGPUParams(detect_races=True)
    for name in names:
        case = cases.by_name(name)
        scores = np.concatenate([draw(case, kind)[:1] for kind in KINDS])
        got = select_largest_mosaic(scores, count=case.count, interpret=parameters)
        chex.assert_trees_all_equal(jax.block_until_ready(got), oracle(scores, case.count))
        print(json.dumps({"case": name}), flush=True)


if __name__ == "__main__":
    interpret_quickly()
    main(sys.argv[1:])
