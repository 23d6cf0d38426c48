"""Law 4 in compiled programs: the pool is updated in place, and depth costs no time to compile."""

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
# Prompts that are appended and then cut, and those that are evicted from as they are read, in one
# pass and one by one; for GPUs one that is only appended, too.
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
    return compile_steps(",".join(PROMPTS_ON_TPU))


@pytest.fixture(scope="module")
def report_on_gpu() -> dict:
    return compile_steps("gpu")


@pytest.fixture(scope="module")
def report_for_h200() -> dict:
    if not (GPU_COMPILER / "jax_plugins").exists():
        pytest.skip("the compiler for GPUs is not there: `make gpu-compiler`")
    names = (",".join(each) for each in (AHEAD, PROMPTS_FOR_GPUS))
    return compile_steps("h200", *names, environment=for_gpus.environment(**SETTINGS))


@pytest.mark.nightly
@pytest.mark.parametrize("policy", POLICIES)
def test_no_copy_of_the_pool_in_a_decode_chunk_on_tpu(policy, report):
    check_in_place(report["memory"][policy])


@pytest.mark.gpu
@pytest.mark.parametrize("policy", POLICIES)
def test_no_copy_of_the_pool_in_a_decode_chunk_on_gpu(policy, report_on_gpu):
    check_on_gpu(report_on_gpu["memory"][policy])


@pytest.mark.nightly
@pytest.mark.parametrize("policy", AHEAD)
def test_no_copy_of_the_pool_in_a_decode_chunk_for_gpus(policy, report_for_h200):
    """Steps compile where layers differ, too: XLA failed at two loops that it had unrolled."""
    check_on_gpu(report_for_h200["memory"][policy])


@pytest.mark.nightly
@pytest.mark.parametrize("policy", PROMPTS_FOR_GPUS)
def test_no_copy_of_the_pool_in_a_chunk_of_prompts_for_gpus(policy, report_for_h200):
    check_in_place(report_for_h200["prompts"][policy])


@pytest.mark.nightly
@pytest.mark.parametrize("policy", PROMPTS_ON_TPU)
def test_no_copy_of_the_pool_in_a_chunk_of_prompts_on_tpu(policy, report):
    check_in_place(report["prompts"][policy])


@pytest.mark.gpu
@pytest.mark.parametrize("policy", POLICIES)
def test_no_copy_of_the_pool_in_a_chunk_of_prompts_on_gpu(policy, report_on_gpu):
    check_in_place(report_on_gpu["prompts"][policy])


def check_in_place(one: dict) -> None:
    """Checks that the pool is updated in place where a chunk is written, read, and maybe cut."""
    assert one["copies"] == []
    assert one["aliased"] >= one["pool_bytes"]  # the cache that comes out is the one put in
    # The pool takes no part in the temporary memory, except that one number per slot (H2O's sums)
    # changes layout once a chunk where a page has fewer than 128 slots.
    assert one["temporary"] < MOST_TEMPORARY * one["pool_bytes"] + one["slot_numbers"]


def check_on_gpu(one: dict) -> None:
    """Checks that the pool is updated in place although other kernels of a step read it.

    Weights are not copied either, even where layers differ.
    """
    assert one["copies"] == []
    assert one["copied_weights"] == []
    assert one["aliased"] >= one["pool_bytes"]


@pytest.mark.nightly
@pytest.mark.parametrize("policy", POLICIES)
def test_no_copy_of_the_pool_where_sequences_are_copied_on_tpu(policy, report):
    one = report["copies"][policy]
    assert one["copies"] == []
    assert one["aliased"] >= one["pool_bytes"]
    # Numbers per slot change layout on the way in, and are padded to 128 slots a page.
    assert one["temporary"] < MOST_TEMPORARY * one["pool_bytes"] + 2 * one["slot_numbers"]


@pytest.mark.gpu
@pytest.mark.parametrize("policy", POLICIES)
def test_no_copy_of_the_pool_where_sequences_are_copied_on_gpu(policy, report_on_gpu):
    one = report_on_gpu["copies"][policy]
    assert one["copies"] == []
    assert one["aliased"] >= one["pool_bytes"]


@pytest.mark.nightly
def test_programs_do_not_grow_with_depth(report):
    """Ten times the layers are the same loop: they are traced, lowered and compiled as quickly."""
    shallow, deep = (report["instructions"][layers] for layers in ("4", "40"))
    assert shallow > 100
    assert deep < 1.02 * shallow
