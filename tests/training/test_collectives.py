"""Law 9: what a step communicates is what its tokens need, on any number of devices."""

import collections
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training import collectives as compiling

ROOT = Path(__file__).resolve().parents[2]
WIDTH, VOCABULARY = compiling.CONFIG.hidden_size, compiling.CONFIG.vocab_size
MATRIX = {f"[{VOCABULARY},{WIDTH}]", f"[{WIDTH},{VOCABULARY}]"}


def check(found, *, times_known):
    """`found`: (kind, arrays, times) of the collectives of a step."""
    gathered = [times for kind, arrays, times in found if kind == "all-gather" and of_head(arrays)]
    # The student's and the teacher's, once a pass at most: never in the loop over chunks.
    most = compiling.PASSES if times_known else 1
    assert len(gathered) == 2
    assert max(gathered) <= most
    # What is reduced is reduced in float32, and no matrix is reduced as a whole.
    for kind, arrays, _ in found:
        if kind in ("reduce-scatter", "all-reduce"):
            assert "bf16" not in arrays
    kinds = collections.Counter(kind for kind, _, _ in found)
    assert kinds["reduce-scatter"] >= 4


def of_head(arrays):
    return any(shape in arrays for shape in MATRIX)


def compiled(target, *shards, **environment):
    """Returns the collectives of a step by number of shards."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.training.collectives", target, *map(str, shards)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        timeout=900,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {data: [tuple(row[1:]) for row in rows if row[0] == data] for data in shards}


@pytest.fixture(scope="module")
def on_cpu():
    return compiled("cpu", 2, 8, JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="8")


@pytest.mark.slow
def test_a_step_gathers_the_output_matrix_once_a_pass(on_cpu):
    for found in on_cpu.values():
        check(found, times_known=True)


@pytest.mark.slow
def test_more_devices_communicate_no_more_each(on_cpu):
    """At the same tokens a device: gathered and reduced arrays as a whole, so without (N - 1) / N.

    Only the tokens themselves, which `look_up` needs of all devices, grow.
    """

    def total(found, data):
        parts = {"reduce-scatter": data}  # the compiler shows the shard that results
        return sum(
            compiling.bytes_of(arrays) * parts.get(kind, 1) * times
            for kind, arrays, times in found
            if "s32" not in arrays
        )

    few, many = (total(on_cpu[data], data) for data in (2, 8))
    assert many == pytest.approx(few, rel=0.01)


@pytest.mark.slow
def test_on_tpu_matrices_are_gathered_in_bfloat16():
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed")
    found = compiled("v5p:2x2x1", 4)[4]
    check(found, times_known=False)
    matrices = [arrays for kind, arrays, _ in found if kind == "all-gather" and "s32" not in arrays]
    assert all(arrays.startswith("bf16") for arrays in matrices)
