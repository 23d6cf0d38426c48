"""Runs scripts that compile for GPUs that are not present, and reads what they print."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.ahead import GPU_COMPILER

ROOT = Path(__file__).resolve().parents[2]
# Nobody runs these programs: tests read their text and their memory. Forms of a product that could
# only be told apart by timing them on a card are not compiled, no second thread compiles beside the
# other tests, and ptxas does not try hard.
QUICKLY = (
    "--xla_gpu_autotune_level=0"
    " --xla_gpu_force_compilation_parallelism=1"
    " --xla_gpu_disable_gpuasm_optimizations=true"
)


def environment(**told: str) -> dict[str, str]:
    """Returns the environment of a process that compiles for GPUs that are not present.

    Args:
      told: variables that differ from this process.
    """
    paths = os.pathsep.join(map(str, (ROOT, GPU_COMPILER)))
    flags = f"{os.environ.get('XLA_FLAGS', '')} {QUICKLY}"
    return os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": paths, "XLA_FLAGS": flags} | told


def told_by(script: str, *arguments: str) -> Any:
    """Runs a script with the compiler for GPUs on its path, in a process of its own.

    Args:
      script: its path from the root of the checkout.
      arguments: what it is called with.

    Returns:
      What its last line says, in JSON. Without the compiler the test is skipped.
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
