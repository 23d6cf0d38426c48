"""Every kernel, interpreted on the CPU, against NumPy, bit by bit, with race detection."""

import pytest

from pallas_kernels.update import cases, gpu, tpu
from tests.pallas_kernels.support import interpret
from tests.pallas_kernels.update.support import operands, write_structs
from tests.support.instances import further

# Listed independently of the kernels, so that a kernel cannot silently drop a case.
SERVED = {
    "mosaic_gpu": [case.name for case in cases.CONTRACT],
    "mosaic_tpu": [case.name for case in cases.CONTRACT if case.dtype in ("bfloat16", "float32")],
}
# The gate's cases: plain pages, scales, and a rotation of zeroed numbers.
QUICK = {
    "mosaic_gpu": ["base", "float8", "rotated_head_dim96"],
    "mosaic_tpu": ["base", "rotated_float32"],
}
GROUPS = [
    *QUICK.items(),
    *further(
        *(
            (form, [name for name in names if name not in QUICK[form]])
            for form, names in SERVED.items()
        )
    ),
]


@pytest.mark.parametrize(("implementation", "kernel"), [("mosaic_gpu", gpu), ("mosaic_tpu", tpu)])
def test_each_kernel_serves_its_listed_cases(implementation, kernel):
    served = [case.name for case in cases.CONTRACT if _serves(kernel, case)]
    assert served == SERVED[implementation]


def _serves(kernel, case) -> bool:
    return kernel.why_not(*operands(write_structs(case))) is None


@pytest.mark.parametrize(("implementation", "names"), GROUPS, ids=str)
def test_kernel_agrees_with_the_oracle(implementation, names):
    interpret("update", implementation, names)
