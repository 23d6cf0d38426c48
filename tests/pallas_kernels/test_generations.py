"""The kernels that need nothing of Hopper's are lowered for the GPUs before and after it."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.mosaic.gpu import utils

from pallas_kernels import (
    decode_attention,
    dispatch,
    prefill_attention,
    select_largest,
    write_pages,
)
from pallas_kernels.decode import cases
from pallas_kernels.dispatch import GPU
from pallas_kernels.prefill import cases as prefill_cases
from pallas_kernels.training import cases as training_cases
from pallas_kernels.update import cases as write_cases
from tests.pallas_kernels.prefill.support import ORDER
from tests.pallas_kernels.prefill.support import structs as prefill_structs
from tests.pallas_kernels.support import lower_for_cuda, structs
from tests.pallas_kernels.training.support import both
from tests.pallas_kernels.training.support import structs as training_structs
from tests.pallas_kernels.update.support import write_structs
from tests.support.instances import further


def lower(name: str, case: str) -> str:
    if name == "decode":
        run = functools.partial(decode_attention, scale=0.1, return_lse=True)
        return lower_for_cuda(run, **structs(cases.by_name(case)))
    if name == "select":
        scores = jax.ShapeDtypeStruct((4, 1024), jnp.dtype(case))
        return lower_for_cuda(functools.partial(select_largest, count=64), scores=scores)
    if name == "training":
        case = training_cases.by_name(case)
        return lower_for_cuda(both(case, None), **training_structs(case))
    if name == "prefill":
        case = prefill_cases.by_name(case)
        run = functools.partial(prefill_attention, window=case.window, scale=0.1)
        return lower_for_cuda(run, **dict(zip(ORDER, prefill_structs(case), strict=True)))
    return lower_for_cuda(write_pages, **write_structs(write_cases.by_name(case)))


A100, L4 = GPU("NVIDIA A100-SXM4-80GB", 108, (8, 0)), GPU("NVIDIA L4", 58, (8, 9))
H200, B200 = GPU("NVIDIA H200", 132, (9, 0)), GPU("NVIDIA B200", 148, (10, 0))


@pytest.mark.parametrize(
    ("card", "name", "case"),
    [
        (A100, "decode", "base"),
        (A100, "select", "float32"),
        (A100, "write", "head_dim64"),
        (A100, "prefill", "plain"),
        (A100, "training", "one_group"),
        (L4, "write", "float8"),
        (B200, "decode", "head_dim96"),
        *further(
            (L4, "decode", "float8_page16"),
            (L4, "prefill", "float16"),
            (H200, "prefill", "float16"),
            (B200, "select", "bfloat16"),
            (B200, "prefill", "no_pages"),
            (B200, "training", "packed"),
        ),
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
