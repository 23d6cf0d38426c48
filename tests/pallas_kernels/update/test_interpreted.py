"""Every kernel, interpreted on the CPU, against NumPy, bit by bit, with races looked for."""

import json
from pathlib import Path

import pytest

from pallas_kernels.update import cases, tpu
from tests.pallas_kernels.support import interpret
from tests.pallas_kernels.update.support import operands, write_structs

SCRIPT = Path(__file__).with_name("interpreted.py")
SERVED = {
    "mosaic_gpu": [case.name for case in cases.CONTRACT],
    "mosaic_tpu": [
        case.name for case in cases.CONTRACT if tpu.why_not(*operands(write_structs(case))) is None
    ],
}


@pytest.mark.parametrize("implementation", SERVED)
def test_kernel_agrees_with_the_oracle(implementation):
    names = SERVED[implementation]
    lines = interpret(SCRIPT, implementation, *names)
    records = [json.loads(line) for line in lines if line.startswith("{")]
    assert records == [{"case": name} for name in names]
