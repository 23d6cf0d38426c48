"""Run write cases in a kernel's interpreter, one JSON line for each case that is right.

The interpreters of Mosaic run threads of their own and can stop for ever, so tests run them here,
in a process that can be ended. Usage: interpreted.py IMPLEMENTATION CASE...
"""

import json
import sys

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.update import cases, gpu, tpu
from tests.pallas_kernels.support import as_arrays, tpu_interpreters
from tests.pallas_kernels.update.support import (
    assert_same_bits,
    operands,
    write_inputs,
    write_oracle,
)


def run(implementation, arrays):
    """Run a case; races are printed."""
    if implementation == "mosaic_tpu":
        # Several blocks of rows, the last of them not full.
        tpu._VMEM_BYTES = 1 << 16
        results, same = (
            jax.block_until_ready(tpu.write_pages_tpu(*operands(arrays), interpret=parameters))
            for parameters in tpu_interpreters()
        )
        assert_same_bits(same, results)
        return results
    parameters = plgpu.InterpretGPUParams(detect_races=True)
    results = gpu.mosaic(*operands(arrays), interpret=parameters)
    return jax.block_until_ready(results)


def main(implementation, names):
    """Run the cases and check them."""
    for name in names:
        inputs = write_inputs(cases.by_name(name))
        results = run(implementation, as_arrays(inputs))
        assert_same_bits(results, write_oracle(inputs))
        print(json.dumps({"case": name}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
