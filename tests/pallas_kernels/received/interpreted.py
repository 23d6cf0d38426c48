"""Run cases of received attention in the Mosaic GPU interpreter, in a process of their own.

    NPROC=4 python -m tests.pallas_kernels.received.interpreted CASE...

See `tests/pallas_kernels/training/interpreted.py` for the reason.
"""

import sys

import jax.numpy as jnp
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

from pallas_kernels.received import cases
from pallas_kernels.received.gpu import received_attention_mosaic
from tests.pallas_kernels.received.support import draw, oracle
from tests.pallas_kernels.support import interpret_quickly, relative_error

# Products of bfloat16 are exact in float32, and sums are in float32.
TOLERANCE = 1e-5


def main() -> None:
    """Run the cases, and say of each that it is right."""
    for name in sys.argv[1:]:
        case = cases.by_name(name)
        arguments, scale = draw(case), case.D**-0.5
        operands = map(jnp.asarray, arguments)
        sums = received_attention_mosaic(*operands, scale=scale, interpret=True)
        assert not get_races().races_found, f"{name}: race"
        error = relative_error(sums, oracle(arguments, scale))
        assert error <= TOLERANCE, f"{name}: {error}"
        print(f"{name} ok", flush=True)


if __name__ == "__main__":
    interpret_quickly()
    main()
