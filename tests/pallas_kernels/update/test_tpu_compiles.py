"""The TPU kernel compiled ahead of time: within VMEM and SMEM of each kind of chip, in place."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[3]
# XLA lays narrower heads out in another way between kernels, and small pools may visit VMEM.
LARGE = ("rows8", "rows256", "rows2048")
SMALL = ("base", "head_dim64", "head_dim96", "head_dim256", "float32", "page16", "page128")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
@pytest.mark.parametrize(
    ("kind", "topology"),
    [("v5litepod-4", "v5e:2x2"), ("v5p-8", "v5p:2x2x1"), ("v6e-4", "v6e:2x2")],
)
def test_kernel_compiles(kind, topology):
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_ACCELERATOR_TYPE": kind,
        "TPU_WORKER_HOSTNAMES": "localhost",
        "PYTHONPATH": str(CHECKOUT),
    }
    script = Path(__file__).with_name("compile_for_tpu.py")
    finished = subprocess.run(
        [sys.executable, str(script), topology, *LARGE, *SMALL],
        env=environment,
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    lines = [line.split() for line in finished.stdout.splitlines()]
    assert [(name, kernel) for name, kernel, _ in lines] == [
        (name, "True") for name in (*LARGE, *SMALL)
    ]
    assert [in_place for _, _, in_place in lines[: len(LARGE)]] == ["True"] * len(LARGE)
