"""Runs scripts that compile for absent GPUs, and reads their output."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.ahead import GPU_COMPILER

ROOT = Path(__file__).resolve().parents[2]
# These programs never run: tests read only their text and memory. Variants of a product that only
# timing on a card could compare are not compiled, one thread compiles beside the other tests, and
# ptxas optimizes little.
QUICKLY = (
    "--xla_gpu_autotune_level=0"
    " --xla_gpu_force_compilation_parallelism=1"
    " --xla_gpu_disable_gpuasm_optimizations=true"
)


def environment(**told: str) -> dict[str, str]:
    """Returns the environment of a process that compiles for absent GPUs.

    Args:
      told: variables different from this process.
    """
    paths = os.pathsep.join(map(str, (ROOT, GPU_COMPILER)))
    flags = f"{os.environ.get('XLA_FLAGS', '')} {QUICKLY}"
    return os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": paths, "XLA_FLAGS": flags} | told


def told_by(script: str, *arguments: str) -> Any:
    """Runs a script in a separate process with the compiler for GPUs on its path.

    Args:
      script: its path from the root of the checkout.
      arguments: its arguments.

    Returns:
      The JSON of its last line. Without the compiler the test is skipped.
    """
    if not (GPU_COMPILER / "jax_plugins").exists():
        pytest.skip("the compiler for GPUs is not there: `make gpu-compiler`")
    done = subprocess.run(
        [sys.executable, str(ROOT / script), *arguments],
        capture_output=True,
        text=True,
        env=environment(JAX_DISABLE_MOST_OPTIMIZATIONS="0"),
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])
