"""The loss reads its logits, most of what a step of a small model moves, no more than it must."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ahead import GPU_COMPILER

ROOT = Path(__file__).resolve().parents[2]
DIRECTIONS = ("reverse", "forward")


@pytest.fixture(scope="module")
def readings() -> dict:
    if not (GPU_COMPILER / "jax_plugins").exists():
        pytest.skip("the compiler for GPUs is not there: `make gpu-compiler`")
    paths = os.pathsep.join(map(str, (ROOT, GPU_COMPILER)))
    told = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "0", "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "training" / "compiled_loss.py"), *DIRECTIONS],
        capture_output=True,
        text=True,
        env=os.environ | told,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_logits_are_read_four_times_on_gpus(direction, readings):
    """Of student and teacher a part for the origin, and all for the sums and for the gradient."""
    assert readings[direction]["others"] == 4
    assert readings[direction]["parts"] == 2
    assert readings[direction].get("products", 0) == 0  # those take the gradient, in bfloat16
