"""Law 4 in compiled programs: the pool is updated in place."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dms_jax.policies import POLICIES
from tests.support import for_gpus
from tests.support.ahead import GPU_COMPILER

ROOT = Path(__file__).resolve().parents[2]
MOST_TEMPORARY = 1 / 50  # of the pool
AHEAD = ("DMS", "Quest", "KCache")  # one kind of layers, and two with one of two selections
SINGLE = ("DMS", "KCache")  # steps in two programs: on the device, and with values on the host
# Prompts that are appended and then cut, and prompts with eviction during prefill, in one pass and
# token by token; for GPUs also one that is only appended.
PROMPTS_ON_TPU = ("SnapKV", "AdaKV", "DMS", "TOVA")
PROMPTS_FOR_GPUS = ("ExpectedAttention", "PyramidKV", "DMS", "TOVA", "KCache")


# jax could not read these programs back without their device.
SETTINGS = {"JAX_ENABLE_COMPILATION_CACHE": "0", "JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}


def compile_steps(*arguments: str, environment: dict[str, str] | None = None) -> dict:
    environment = environment or os.environ | SETTINGS | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "laws" / "compiled_steps.py"), *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def report() -> dict:
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed")
    return compile_steps(",".join(PROMPTS_ON_TPU), ",".join(SINGLE))


@pytest.fixture(scope="module")
def report_for_h200() -> dict:
    if not (GPU_COMPILER / "jax_plugins").exists():
        pytest.skip("the compiler for GPUs is not there: `make gpu-compiler`")
    names = (",".join(each) for each in (AHEAD, PROMPTS_FOR_GPUS, SINGLE))
    return compile_steps("h200", *names, environment=for_gpus.environment(**SETTINGS))


def misses(reports: dict, program: str, *, on_gpu: bool) -> dict:
    """Returns the reports of programs that copy the pool, by policy.

    The output cache aliases the input. The pool is not part of the temporary memory, with two
    exceptions: one number per slot (H2O's sums) changes layout once a chunk if a page has fewer
    than 128 slots, and is padded to 128 when sequences are copied. On a GPU a step's weights are
    not copied either, even if layers differ; there only the temporary memory of prompts is bounded.
    """
    slots = 2 if program == "copies" else 1

    def wrong(one: dict) -> bool:
        most = MOST_TEMPORARY * one["pool_bytes"] + slots * one["slot_numbers"]
        steps = on_gpu and program in ("memory", "single")
        copied = one["copies"] + (one["copied_weights"] if steps else [])
        bounded = not on_gpu or program == "prompts"
        in_place = one["aliased"] >= one["pool_bytes"]
        return bool(copied) or not in_place or (bounded and one["temporary"] >= most)

    return {policy: one for policy, one in reports[program].items() if wrong(one)}


every_program = pytest.mark.parametrize("program", ["memory", "single", "prompts", "copies"])


@pytest.mark.nightly
@every_program
def test_pool_is_updated_in_place_on_tpu(program, report):
    """In steps, also single ones; in prefill with cuts; in copies."""
    some = {"prompts": PROMPTS_ON_TPU, "single": SINGLE}
    assert set(report[program]) == set(some.get(program, POLICIES))
    assert not misses(report, program, on_gpu=False)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("program", "names"),
    [("memory", AHEAD), ("single", SINGLE), ("prompts", PROMPTS_FOR_GPUS)],
)
def test_pool_is_updated_in_place_for_absent_gpus(program, names, report_for_h200):
    """Steps also compile if layers differ: XLA used to fail at two unrolled loops."""
    assert set(report_for_h200[program]) == set(names)
    assert not misses(report_for_h200, program, on_gpu=True)
