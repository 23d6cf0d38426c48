"""Run write cases in a kernel's interpreter, one JSON line for each case that is right.

The interpreters of Mosaic run threads of their own and can stop for ever, so tests run them here,
in a process that can be ended. Usage: interpreted.py IMPLEMENTATION CASE...
"""

import functools
import json
import sys

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.update import cases, gpu, tpu
from pallas_kernels.update.reference import write_pages_xla
from tests.pallas_kernels.support import as_arrays, interpret_quickly, tpu_interpreters
from tests.pallas_kernels.update.support import (
    assert_agrees,
    assert_rounded_alike,
    assert_same_bits,
    operands,
    write_inputs,
)


def run(implementation, case, arrays):
    """Run a case; races are printed."""
    kernel = {"mosaic_tpu": tpu.write_pages_tpu, "mosaic_gpu": gpu.mosaic}[implementation]
    kernel = functools.partial(kernel, *operands(arrays), zeroed=case.zeroed)
    if implementation == "mosaic_tpu":
        # Several blocks of rows, the last of them not full.
        tpu._VMEM_BYTES = 1 << 16
        results, same = (
            jax.block_until_ready(kernel(interpret=parameters)) for parameters in tpu_interpreters()
        )
        assert_same_bits(same, results)
        return results
    return jax.block_until_ready(kernel(interpret=plgpu.InterpretGPUParams(detect_races=True)))


def main(implementation, names):
    """Run the cases and check them."""
    for name in names:
        case = cases.by_name(name)
        inputs = write_inputs(case)
        arrays = as_arrays(inputs)
        results = run(implementation, case, arrays)
        assert_agrees(case, inputs, results)
        # A rotation too, which the oracle does not round as float32 does.
        assert_rounded_alike(results, write_pages_xla(*operands(arrays), zeroed=case.zeroed))
        print(json.dumps({"case": name}), flush=True)


if __name__ == "__main__":
    interpret_quickly()
    main(sys.argv[1], sys.argv[2:])
