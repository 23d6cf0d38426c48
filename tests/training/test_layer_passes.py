"""The loops over layers write what the backward pass needs once, and their gradients once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ahead import GPU_COMPILER

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def passes() -> dict[str, int]:
    if not (GPU_COMPILER / "jax_plugins").exists():
        pytest.skip("the compiler for GPUs is not there: `make gpu-compiler`")
    paths = os.pathsep.join(map(str, (ROOT, GPU_COMPILER)))
    told = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "0", "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "training" / "compiled_layers.py")],
        capture_output=True,
        text=True,
        env=os.environ | told,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_stacks_are_not_filled_before_layers_fill_them(passes):
    """By default XLA fills them with zeros: 11 GB of a step of Qwen2.5-0.5B."""
    assert passes["zeroed"] == 0
    assert passes["zeroed_by_default"] > 10e6  # or what counts them sees nothing any more


@pytest.mark.slow
def test_the_gradient_of_gate_and_up_is_written_at_once(passes):
    """Not each half by itself, padded with zeros, and then their sum."""
    assert passes["gates"] == 1
    assert passes["padded"] == 0
