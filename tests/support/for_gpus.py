"""What a script says that compiles for GPUs which are not there."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.ahead import GPU_COMPILER

ROOT = Path(__file__).resolve().parents[2]


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
    paths = os.pathsep.join(map(str, (ROOT, GPU_COMPILER)))
    told = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "0", "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, str(ROOT / script), *arguments],
        capture_output=True,
        text=True,
        env=os.environ | told,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])
