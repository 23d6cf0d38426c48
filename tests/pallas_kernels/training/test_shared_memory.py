"""The shared memory of training and prefill kernels: plans count what Mosaic allocates."""

import dataclasses
import functools

import jax.numpy as jnp
import pytest

from pallas_kernels import prefill_attention
from pallas_kernels.dispatch import DEFAULT_GPU, GPU
from pallas_kernels.prefill import cases as prefill_cases
from pallas_kernels.prefill import gpu as prompt
from pallas_kernels.shared_memory import REDUCTION_BYTES, shared_bytes
from pallas_kernels.training import (
    cases,
    gpu_forward,
    gpu_key_gradient,
    gpu_query_gradient,
    gpu_tiles,
)
from tests.pallas_kernels.prefill.support import ORDER
from tests.pallas_kernels.prefill.support import structs as prefill_structs
from tests.pallas_kernels.support import launched_with
from tests.pallas_kernels.training.support import both, structs
from tests.support.instances import further

# A card of the measured generation without a file.
UNKNOWN = GPU("NVIDIA H100 PCIe", 114, (9, 0))
HOPPER = 227 * 1024
# The limit per program by card (CUDA programming guide).
L4, B200 = GPU("NVIDIA L4", 58, (8, 9)), GPU("NVIDIA B200", 148, (10, 0))
OTHERS = {L4: 99 * 1024, B200: 227 * 1024}
TRAINING = (  # in launch order
    (gpu_forward, REDUCTION_BYTES),
    (gpu_key_gradient, REDUCTION_BYTES),
    (gpu_query_gradient, gpu_query_gradient.REDUCTIONS),
)
every_hopper = pytest.mark.parametrize(
    "card", [DEFAULT_GPU, UNKNOWN], ids=["measured", "by heuristic"]
)


def problem(head_dim: int, packed: bool, placed: bool) -> gpu_tiles.Problem:
    sizes = dict(B=1, T=256, S=512 if placed else 256, H=4, K=2, D=head_dim, window=16, scale=1.0)
    mask = dict(packed=packed, placed=placed, interpret=False)
    return gpu_tiles.Problem(**sizes, dtype=jnp.dtype("bfloat16"), **mask)


def counted(kernel, reductions: int, one: gpu_tiles.Problem) -> int:
    return shared_bytes(kernel.scratch_of(one, kernel.ring_of(one)), reductions)


def of_training(head_dim: int, packed: bool, placed: bool):
    """A call with the shapes of `problem`, as a function and its arguments."""
    case = cases.TrainingCase("any", 1, 512, 4, 2, head_dim, 16, segments=60 if packed else 0)
    return both(case, None), structs(case, queries=256 if placed else None)


@every_hopper
@pytest.mark.parametrize(
    ("head_dim", "packed", "placed"),
    [(256, True, True), (64, False, False), *further((128, True, False), (256, False, False))],
)
def test_training_kernels_take_the_counted_bytes(card, head_dim, packed, placed, monkeypatch):
    function, shapes = of_training(head_dim, packed, placed)
    launched = launched_with(card, function, **shapes)
    monkeypatch.setattr(gpu_tiles, "target_gpu", lambda: card)
    one = problem(head_dim, packed, placed)
    assert launched == [counted(*each, one) for each in TRAINING]


@every_hopper
@pytest.mark.parametrize("head_dim", [96, *further(64, 128, 256)])
def test_prompt_kernels_take_the_counted_bytes(card, head_dim, monkeypatch):
    case = dataclasses.replace(prefill_cases.by_name("plain"), D=head_dim)
    function = functools.partial(prefill_attention, window=case.window, scale=0.1)
    shapes = dict(zip(ORDER, prefill_structs(case), strict=True))
    launched = launched_with(card, function, **shapes)
    monkeypatch.setattr(gpu_tiles, "target_gpu", lambda: card)
    assert launched == [counted(prompt, REDUCTION_BYTES, problem(head_dim, False, False))]


@every_hopper
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("packed", [False, True])
def test_every_plan_fits(card, head_dim, packed, monkeypatch):
    monkeypatch.setattr(gpu_tiles, "target_gpu", lambda: card)
    one = problem(head_dim, packed, placed=packed)
    kernels = [(prompt, REDUCTION_BYTES), *(TRAINING if head_dim % 64 == 0 else ())]
    for kernel, reductions in kernels:
        assert counted(kernel, reductions, one) <= HOPPER, kernel
        ring = kernel.ring_of(one)
        assert gpu_tiles.fits(kernel.scratch_of, one, ring, reductions)
        assert gpu_tiles.TILE % ring.block == 0


@pytest.mark.parametrize(
    ("card", "head_dim"),
    [(L4, 128), *further((L4, 256), (B200, 128))],
    ids=lambda each: getattr(each, "kind", each),
)
def test_amperes_kernels_fit_every_gpu(card, head_dim):
    """The gradients of keys take the most: keys, values, queries and gradients of outputs.

    An A100 has the tiles of an L4 (`test_kernels.py`) and more memory; narrower heads take less.
    """
    case = dataclasses.replace(prefill_cases.by_name("plain"), D=head_dim)
    function = functools.partial(prefill_attention, window=case.window, scale=0.1)
    launched = launched_with(card, function, **dict(zip(ORDER, prefill_structs(case), strict=True)))
    if head_dim <= 128 or card.capability < (10, 0):  # XLA trains wider heads on Blackwell
        function, shapes = of_training(head_dim, packed=True, placed=False)
        launched += launched_with(card, function, **shapes)
        assert len(launched) == 4
    assert max(launched) <= OTHERS[card]
