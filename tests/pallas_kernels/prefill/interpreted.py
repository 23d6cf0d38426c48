"""Run GPU prompt cases in the Mosaic GPU interpreter, in a process of their own.

    NPROC=4 python -m tests.pallas_kernels.prefill.interpreted IMPLEMENTATION CASE...

See `tests/pallas_kernels/training/interpreted.py` for the reason.
"""

import sys

import jax.numpy as jnp
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

from pallas_kernels.prefill import cases, gpu, mma
from tests.pallas_kernels.prefill.support import draw, oracle, split_keys
from tests.pallas_kernels.support import TOLERANCE, interpret_quickly, relative_error


def main() -> None:
    wanted = {case.name: case for case in cases.CONTRACT}
    module = {"mosaic_gpu": gpu, "mosaic_mma": mma}[sys.argv[1]]
    for name in sys.argv[2:]:
        case = wanted[name]
        arguments, scale = draw(case), case.D**-0.5
        operands = split_keys([*map(jnp.asarray, arguments)])
        output = module.prefill(*operands, window=case.window, scale=scale, interpret=True)
        assert not get_races().races_found, f"{name}: race"
        error = relative_error(output, oracle(arguments, case.window, scale))
        assert error <= TOLERANCE[case.dtype], f"{name}: {error}"
        print(f"{name} ok", flush=True)


if __name__ == "__main__":
    interpret_quickly()
    main()
