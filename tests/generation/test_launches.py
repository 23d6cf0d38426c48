"""A layer of a decode step on a GPU is few launches: each costs as much as reading megabytes."""

import json
import os
import subprocess
import sys

import pytest

from tests.support.ahead import GPU_COMPILER

ROOT = GPU_COMPILER.parent
# A norm, the product, the rotation and write of it, attention and its combination, a product; a
# norm, a product, the gate, a product. What policies keep of the rows, and what is sliced for the
# layers of a turn, is the fraction.
MOST = 10 + 1


@pytest.mark.slow
@pytest.mark.skipif(
    not (GPU_COMPILER / "jax_plugins").exists(),
    reason="the compiler for GPUs is not installed (make gpu-compiler, 142 MB)",
)
def test_a_layer_is_few_launches_and_copies_nothing_large():
    done = subprocess.run(
        [sys.executable, "-m", "tests.generation.launches"],
        capture_output=True,
        text=True,
        env=os.environ
        | {
            "PYTHONPATH": f"{ROOT}{os.pathsep}{GPU_COMPILER}",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "0",
        },
        timeout=600,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert [each["copies"] for each in found.values()] == [0, 0, 0, 0]
    launches = [found[name]["launches"] for name in ("Vanilla", "DMS")]
    # Fewer than the products, the write and the attention of a layer: a graph would count as one.
    assert min(launches) > 6, found
    assert max(launches) <= MOST, found
    assert found["norms of queries and keys"]["launches"] <= MOST + 1, found  # one pass for both
