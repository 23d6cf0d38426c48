"""Every kernel, interpreted on the CPU, against NumPy, bit by bit, with races looked for."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pallas_kernels.update import cases, tpu
from tests.pallas_kernels.update.support import operands, write_structs

CHECKOUT = Path(__file__).resolve().parents[3]
SERVED = {
    "mosaic_gpu": [case.name for case in cases.CONTRACT],
    "triton": [case.name for case in cases.CONTRACT if case.head_dim != 96],
    "mosaic_tpu": [
        case.name for case in cases.CONTRACT if tpu.why_not(*operands(write_structs(case))) is None
    ],
}


@pytest.mark.parametrize("implementation", SERVED)
def test_kernel_agrees_with_the_oracle(implementation):
    names = SERVED[implementation]
    # With fewer threads than a program has warpgroups the interpreter of Mosaic GPU waits for ever.
    environment = os.environ | {"NPROC": "4", "PYTHONPATH": str(CHECKOUT)}
    script = Path(__file__).with_name("interpreted.py")
    finished = subprocess.run(
        [sys.executable, str(script), implementation, *names],
        env=environment,
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    records = [json.loads(line) for line in finished.stdout.splitlines() if line.startswith("{")]
    assert records == [{"case": name, "right": True, "raced": False} for name in names]
