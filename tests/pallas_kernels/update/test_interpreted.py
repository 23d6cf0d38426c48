"""Every kernel, interpreted on the CPU, against NumPy, bit by bit, with race detection."""

import pytest

from pallas_kernels.update import cases, gpu, tpu
from tests.pallas_kernels.support import interpret
from tests.pallas_kernels.update.support import operands, write_structs

# Listed independently of the kernels, so that a kernel cannot silently drop a case.
SERVED = {
    "mosaic_gpu": [case.name for case in cases.CONTRACT],
    "mosaic_tpu": [case.name for case in cases.CONTRACT if case.dtype in ("bfloat16", "float32")],
}


@pytest.mark.parametrize(("implementation", "kernel"), [("mosaic_gpu", gpu), ("mosaic_tpu", tpu)])
def test_each_kernel_serves_its_listed_cases(implementation, kernel):
    served = [case.name for case in cases.CONTRACT if _serves(kernel, case)]
    assert served == SERVED[implementation]


def _serves(kernel, case) -> bool:
    return kernel.why_not(*operands(write_structs(case))) is None


@pytest.mark.parametrize("implementation", SERVED)
def test_kernel_agrees_with_the_oracle(implementation):
    interpret("update", implementation, SERVED[implementation])
