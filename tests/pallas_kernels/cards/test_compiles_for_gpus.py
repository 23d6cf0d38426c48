"""Kernels compile for Ampere, Ada, Hopper and Blackwell on machines without these GPUs."""

import pytest
from jax.experimental.mosaic.gpu import utils

from pallas_kernels import dispatch
from tests.pallas_kernels.cards import compile_for_gpus
from tests.pallas_kernels.support import lower_for_cuda
from tests.support import gpu_compiler
from tests.support.for_gpus import told_by
from tests.support.instances import nightly_but

CASES = [
    (kind, case)
    for kind, own in compile_for_gpus.KERNELS.items()
    for case in (*own, *compile_for_gpus.EVERYWHERE)
]
# A kernel of each kind, and of each architecture; training on others than Hopper takes 15 s.
QUICK = [
    ("a100", "decode base"),
    ("a100", "select float32"),
    ("l4", "write float8"),
    ("h200", "training packed"),
    ("b200", "prefill dim_96"),
    ("b200", "decode group16_head_dim512"),
]


@pytest.mark.parametrize(("kind", "case"), nightly_but(QUICK, CASES))
def test_kernels_lower(kind, case, monkeypatch):
    """Needs no compiler for GPUs."""
    card = gpu_compiler.CARDS[kind]
    gpu = dispatch.GPU(card.name, card.cores, card.capability)
    # jax plans instructions for the present GPU, or for Hopper without one.
    asked = []
    monkeypatch.setattr(utils, "_infer_arch", lambda: asked.append(gpu) or gpu.capability)
    monkeypatch.setattr(dispatch, "_local_gpu", lambda: gpu)
    function, shapes = compile_for_gpus.call(*case.split(maxsplit=1))
    assert "stablehlo.custom_call @mosaic_gpu" in lower_for_cuda(function, **shapes)
    assert asked


@pytest.mark.nightly
@pytest.mark.parametrize("kind", compile_for_gpus.KERNELS)
def test_kernels_compile_for(kind):
    counts = told_by("tests/pallas_kernels/cards/compile_for_gpus.py", kind)
    assert len(counts) >= 7
    for case, kernels in counts.items():
        # Attention and the merge of split rows; on Hopper the plan is also a kernel.
        wanted = {"decode": 3 if kind == "h200" else 2, "write": 1, "select": 1}
        wanted |= {"training": 3, "prefill": 1, "received": 2, "grouped": 2}
        assert kernels == wanted[case.split()[0]], case
