"""Law 4 in compiled programs: the pool is updated in place."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import for_gpus
from tests.support.ahead import GPU_COMPILER

ROOT = Path(__file__).resolve().parents[2]
MOST_TEMPORARY = 1 / 50  # of the pool
# jax could not read these programs back without their device.
SETTINGS = {"JAX_ENABLE_COMPILATION_CACHE": "0", "JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}


@pytest.fixture(scope="module", params=["tpu", "h200"])
def report(request) -> tuple[str, dict]:
    """A device, and the compiler's reports of programs for it, by program and policy."""
    device = request.param
    environment = os.environ | SETTINGS | {"PYTHONPATH": str(ROOT)}
    if device == "tpu" and importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed")
    if device == "h200":
        if not (GPU_COMPILER / "jax_plugins").exists():
            pytest.skip("the compiler for GPUs is not there: `make gpu-compiler`")
        environment = for_gpus.environment(**SETTINGS)
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "laws" / "compiled_steps.py"), device],
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return device, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.nightly
@pytest.mark.parametrize("program", ["steps", "checked", "redraw", "prompts"])
def test_pool_is_updated_in_place(program, report):
    """The output cache aliases the input, and the pool is not part of the temporary memory.

    One number per slot (H2O's sums) changes layout once a chunk if a page has fewer than 128 slots.
    On a GPU a step's weights are not copied either, even if layers differ; there only the temporary
    memory of prompts is bounded.
    """
    device, reports = report
    for policy, one in reports[program].items():
        assert not one["copies"], policy
        assert one["aliased"] >= one["pool_bytes"], policy
        if device == "h200" and program != "prompts":
            assert not one["copied_weights"], policy
        else:
            most = MOST_TEMPORARY * one["pool_bytes"] + one["slot_numbers"]
            assert one["temporary"] < most, policy
