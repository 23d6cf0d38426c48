"""The kernels that need nothing of Hopper's are lowered for the GPUs before and after it."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.mosaic.gpu import utils

from pallas_kernels import decode_attention, dispatch, select_largest, write_pages
from pallas_kernels.decode import cases
from pallas_kernels.dispatch import GPU
from pallas_kernels.update import cases as write_cases
from tests.pallas_kernels.support import lower_for_cuda, structs
from tests.pallas_kernels.update.support import write_structs
from tests.support.instances import further


def lower(name: str, case: str) -> str:
    if name == "decode":
        run = functools.partial(decode_attention, scale=0.1, return_lse=True)
        return lower_for_cuda(run, **structs(cases.by_name(case)))
    if name == "select":
        scores = jax.ShapeDtypeStruct((4, 1024), jnp.dtype(case))
        return lower_for_cuda(functools.partial(select_largest, count=64), scores=scores)
    return lower_for_cuda(write_pages, **write_structs(write_cases.by_name(case)))


@pytest.mark.parametrize(
    ("card", "name", "case"),
    [
        (GPU("NVIDIA A100-SXM4-80GB", 108, (8, 0)), "decode", "base"),
        (GPU("NVIDIA A100-SXM4-80GB", 108, (8, 0)), "select", "float32"),
        (GPU("NVIDIA A100-SXM4-80GB", 108, (8, 0)), "write", "head_dim64"),
        *further((GPU("NVIDIA L4", 58, (8, 9)), "decode", "float8_page16")),
        (GPU("NVIDIA L4", 58, (8, 9)), "write", "float8"),
        (GPU("NVIDIA B200", 148, (10, 0)), "decode", "head_dim96"),
        (GPU("NVIDIA B200", 148, (10, 0)), "select", "bfloat16"),
    ],
    ids=lambda x: getattr(x, "kind", x),
)
def test_lowers_for(card, name, case, monkeypatch):
    # What jax plans instructions for is the GPU that is there; of one that is not, it is Hopper.
    asked = []
    monkeypatch.setattr(utils, "_infer_arch", lambda: asked.append(card) or card.capability)
    monkeypatch.setattr(dispatch, "_local_gpu", lambda: card)
    assert "stablehlo.custom_call @mosaic_gpu" in lower(name, case)
    assert asked
