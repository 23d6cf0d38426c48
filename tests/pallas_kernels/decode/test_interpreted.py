"""Every kernel, interpreted on the CPU, against float64 NumPy, with race detection.

Unread slots and unowned pages hold NaN; dead table entries point outside the pool.
"""

import pytest

from pallas_kernels.decode import cases
from tests.pallas_kernels.decode.served import refusal
from tests.pallas_kernels.support import interpret

NIGHTLY = pytest.mark.nightly
# Cases per process: enough to pay for its start, few enough to share the cores.
TOGETHER = 13
# One case of each feature.
MMA = [
    "base",
    "group16_head_dim256",
    "head_dim512",
    "head_dim96",
    "float8_page16",
    "float8_float16",
    "page16",
    "one_long_row",
]

# The gate's cases of each form, in one process: scales of pages, and more tables than are cached.
QUICK = {
    "mosaic_gpu": ["base", "float8_one_long_row"],
    "mosaic_mma": ["base"],
    "mosaic_tpu": ["base", "many_short_rows"],
}

# Long rows of float8 pages are read in tiles of two pages.
LONG_TILE = [
    f"{name}:128"
    for name in ("float8", "float8_one_long_row", "float8_group8_head_dim64", "float8_page16")
]


def groups() -> list:
    # Mosaic GPU's interpreter also copies scales that a card refuses.
    served = {
        "mosaic_gpu": [case.name for case in cases.CONTRACT if case.dtype != "float32"],
        "mosaic_mma": MMA,
        "mosaic_tpu": [case.name for case in cases.CONTRACT if refusal(case, "mosaic_tpu") is None],
    }
    late = {
        form: [name for name in names if name not in QUICK[form]] for form, names in served.items()
    }
    return [
        *(pytest.param(form, names, id=f"{form}-{names[0]}") for form, names in QUICK.items()),
        *(
            pytest.param(form, names[at : at + TOGETHER], id=f"{form}-{names[at]}", marks=NIGHTLY)
            for form, names in late.items()
            for at in range(0, len(names), TOGETHER)
        ),
        pytest.param("mosaic_gpu", LONG_TILE, id="mosaic_gpu-tiles_of_128", marks=NIGHTLY),
    ]


@pytest.mark.parametrize(("implementation", "names"), groups())
def test_kernel_agrees_with_the_oracle(implementation, names):
    interpret("decode", implementation, names)
