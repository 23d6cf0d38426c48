"""Law 4 in compiled programs: the pool is updated in place, and depth costs no compile time."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dms_jax.policies import POLICIES

ROOT = Path(__file__).resolve().parents[2]
MOST_SECONDS_RATIO = 1.3


def compile_steps(*arguments: str) -> dict:
    environment = os.environ | {
        "JAX_ENABLE_COMPILATION_CACHE": "0",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "0",
        "PYTHONPATH": str(ROOT),
    }
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
    return compile_steps()


@pytest.fixture(scope="module")
def report_on_gpu() -> dict:
    return compile_steps("gpu")


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_no_copy_of_the_pool_in_a_decode_chunk_on_tpu(policy, report):
    small, large = report["memory"][policy]
    assert large["pool_bytes"] == 4 * small["pool_bytes"]
    for one in (small, large):
        assert one["copies"] == []
        assert one["aliased"] >= one["pool_bytes"]  # the cache that comes out is the one put in
    # A pool of four times the size needs no more temporary memory, except that one number per slot
    # (H2O's sums) changes layout once a chunk where a page has fewer than 128 slots.
    growth = large["pool_bytes"] - small["pool_bytes"]
    numbers = large["slot_numbers"] - small["slot_numbers"]
    assert large["temporary"] - small["temporary"] < growth / 50 + numbers


@pytest.mark.gpu
@pytest.mark.parametrize("policy", POLICIES)
def test_no_copy_of_the_pool_in_a_decode_chunk_on_gpu(policy, report_on_gpu):
    """Checks that the pool is updated in place although other kernels of a step read it.

    Weights are not copied either, even where layers differ.
    """
    for one in report_on_gpu["memory"][policy]:
        assert one["copies"] == []
        assert one["copied_weights"] == []
        assert one["aliased"] >= one["pool_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_no_copy_of_the_pool_where_sequences_are_copied_on_tpu(policy, report):
    small, large = report["copies"][policy]
    for one in (small, large):
        assert one["copies"] == []
        assert one["aliased"] >= one["pool_bytes"]
    growth = large["pool_bytes"] - small["pool_bytes"]
    numbers = large["slot_numbers"] - small["slot_numbers"]
    # Numbers per slot change layout on the way in, and are padded to 128 slots a page.
    assert large["temporary"] - small["temporary"] < growth / 50 + 2 * numbers


@pytest.mark.gpu
@pytest.mark.parametrize("policy", POLICIES)
def test_no_copy_of_the_pool_where_sequences_are_copied_on_gpu(policy, report_on_gpu):
    for one in report_on_gpu["copies"][policy]:
        assert one["copies"] == []
        assert one["aliased"] >= one["pool_bytes"]


@pytest.mark.slow
def test_compile_time_does_not_grow_with_depth(report, record_property):
    """Checks that ten times the layers compile to the same program in the same CPU time."""
    shallow, deep = ([pair[index] for pair in report["times"]] for index in (0, 1))
    assert deep[0][1] < 1.02 * shallow[0][1]  # instructions
    ratio = min(seconds for seconds, _ in deep) / min(seconds for seconds, _ in shallow)
    record_property("ratio", ratio)
    assert ratio < MOST_SECONDS_RATIO
