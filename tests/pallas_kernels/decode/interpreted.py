"""Run decode cases in a kernel's interpreter and print what came out, one JSON line a case.

The interpreters of Mosaic run threads of their own and can stop for ever, so tests run them here,
in a process that can be ended. Usage: interpreted.py IMPLEMENTATION TILE CASE...
"""

import json
import sys

import chex
import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode import cases, gpu, tpu
from pallas_kernels.decode.plan import make_plan
from tests.pallas_kernels.support import (
    as_arrays,
    decode_inputs,
    decode_oracle,
    interpret_quickly,
    relative_error,
    split_rows,
    tpu_interpreters,
)

SCALE = 0.1
# Few enough for the interpreter, enough to cut rows; a single row is cut so often that its partials
# are shared out.
PROGRAMS, PROGRAMS_OF_ONE_ROW = 5, 22


def run(implementation, arrays, tile):
    """Run a case; races are printed."""
    q, rows = split_rows(arrays)
    wanted = {"scale": SCALE, "return_lse": True, "return_scores": True}
    if implementation == "mosaic_tpu":
        results, same = (
            jax.block_until_ready(tpu.decode_attention_tpu(q, rows, **wanted, interpret=parameters))
            for parameters in tpu_interpreters()
        )
        chex.assert_trees_all_equal(results, same)
        return results
    programs = PROGRAMS_OF_ONE_ROW if len(rows.lengths) == 1 else PROGRAMS
    # A plan may be made before a step knows whether its rows grow: with a last tile that is empty.
    planned = rows.lengths + jnp.arange(len(rows.lengths), dtype=jnp.int32) % 2
    plan = make_plan(planned, tile=tile, programs=programs)
    # Plans may be longer than it takes.
    plan = jax.tree.map(lambda x: jnp.pad(x, (0, 3), constant_values=1 << 20), plan)
    parameters = plgpu.InterpretGPUParams(detect_races=True)
    if implementation == "mosaic_mma":
        return jax.block_until_ready(gpu.mma(q, rows, plan, **wanted, interpret=parameters))
    # Of the widest heads no second tile fits.
    stages = gpu.settings_of("mosaic_gpu", gpu._shape(q, rows))["stages"]
    settings = {"programs_per_core": 1, "stages": min(2, stages)}
    results = gpu.mosaic(q, rows, plan, **wanted, settings=settings, interpret=parameters)
    return jax.block_until_ready(results)


def main(implementation, tile, names):
    """Run the cases in tiles of this many slots, or of a page, and print their errors."""
    for name in names:
        case = cases.by_name(name)
        inputs = decode_inputs(case)
        results = run(implementation, as_arrays(inputs), max(tile, case.page_size))
        errors = [
            relative_error(got, want)
            for got, want in zip(results, decode_oracle(inputs, SCALE), strict=True)
        ]
        print(json.dumps({"case": name, "errors": errors}), flush=True)


if __name__ == "__main__":
    interpret_quickly()
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
