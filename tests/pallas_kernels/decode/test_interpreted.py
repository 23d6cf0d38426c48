"""Every kernel, interpreted on the CPU, against float64 NumPy, with races looked for.

Unread slots and pages of no row hold NaN, dead table entries lie outside the pool.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pallas_kernels.decode import cases, tpu
from tests.pallas_kernels.support import TOLERANCE, structs

CHECKOUT = Path(__file__).resolve().parents[3]
# Cases of one process: enough to make up for its start, few enough to share the cores.
TOGETHER = 6


def tpu_serves(case) -> bool:
    shapes = {"k_scales": None, "v_scales": None} | structs(case)
    return tpu.why_not(**shapes, plan=None) is None


def groups():
    for implementation in ("mosaic_gpu", "triton", "mosaic_tpu"):
        served = [
            case.name
            for case in cases.CONTRACT
            if implementation != "mosaic_tpu" or tpu_serves(case)
        ]
        # Kernels that need more shared memory than there is still run in the interpreter.
        for start in range(0, len(served), TOGETHER):
            names = served[start : start + TOGETHER]
            yield pytest.param(implementation, names, id=f"{implementation}-{names[0]}-and-on")


@pytest.mark.slow
@pytest.mark.parametrize(("implementation", "names"), groups())
def test_kernel_agrees_with_the_oracle(implementation, names):
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
    assert [record["case"] for record in records] == names
    for record in records:
        case = cases.by_name(record["case"])
        out, lse, scores = record["errors"]
        assert not record["raced"], record
        assert out <= TOLERANCE[case.dtype], record
        # The Triton form rounds scaled float8 keys to bfloat16.
        rounded = case.pages_dtype is not None and implementation == "triton"
        assert max(lse, scores) <= (1e-2 if rounded else 1e-5), record
