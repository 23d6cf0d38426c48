"""The shared memory of decode kernels: plans count what Mosaic allocates."""

import functools
import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import decode_plan, dispatch
from pallas_kernels.decode import cases, gpu
from pallas_kernels.dispatch import GPU
from tests.pallas_kernels.support import (
    by_name,
    launched_with,
    split_rows,
    structs,
    with_all_results,
)
from tests.support.instances import further, nightly_but

KB = 1024
A100 = GPU("NVIDIA A100-SXM4-80GB", 108, (8, 0))
# Shared memory of a core by compute capability (CUDA programming guide, table of technical
# specifications); each resident program takes 1 KB beside its own.
OF_A_CORE = {
    A100: 164 * KB,
    GPU("NVIDIA A10", 72, (8, 6)): 100 * KB,
    GPU("Jetson AGX Orin", 16, (8, 7)): 164 * KB,
    GPU("NVIDIA L4", 58, (8, 9)): 100 * KB,
    GPU("NVIDIA L40S", 142, (8, 9)): 100 * KB,
    GPU("NVIDIA H100 80GB HBM3", 132, (9, 0)): 228 * KB,
    GPU("NVIDIA H200", 132, (9, 0)): 228 * KB,
    GPU("NVIDIA B200", 148, (10, 0)): 228 * KB,
    GPU("NVIDIA Thor", 20, (11, 0)): 228 * KB,
    GPU("NVIDIA RTX PRO 6000 Blackwell Server Edition", 188, (12, 0)): 100 * KB,
}
# Four programs of 128 threads have 128 registers per thread, and wider heads need more.
MOST = {64: 4, 96: 4, 128: 4, 256: 2, 512: 2}
HEAD_DIMS, PAGE_SIZES = (64, 96, 128, 256, 512), (16, 64, 128)


def attention(case, implementation):
    """The attention kernel's bytes, and the counted bytes."""
    shapes = structs(case)
    launched = launched_with(dispatch.DEFAULT_GPU, with_all_results(implementation), **shapes)
    q, rows = split_rows(shapes)
    shape = gpu._shape(q, rows)
    spec = gpu.spec_of(
        q,
        rows.k_pages,
        gpu.settings_of(implementation, shape),
        tile=gpu.tile_of(implementation, shape),
        copies=implementation == "mosaic_gpu",
        programs=1,
        scale=0.1,
        return_lse=True,
        return_scores=True,
    )
    # On Hopper the plan is launched before it, and always the merge of rows after it.
    return launched[implementation == "mosaic_gpu"], spec.shared_bytes


def shapes():
    # Pages of 16 are read in tiles of 64.
    some = [(16, 8), (128, 16)]
    for head_dim, (page_size, group) in itertools.product(HEAD_DIMS, some):
        if (head_dim, page_size) == (512, 128):  # too large for every card
            continue
        yield replace(
            cases.BASE,
            name=f"head_dim{head_dim}_page{page_size}_group{group}",
            head_dim=head_dim,
            page_size=page_size,
            group=group,
        )


QUICK = [case for case in shapes() if case.page_size == 16 and case.head_dim in (64, 512)]


@pytest.mark.parametrize("case", nightly_but(QUICK, shapes()), ids=lambda case: case.name)
def test_amperes_kernel_takes_the_counted_bytes(case):
    launched, counted = attention(case, "mosaic_mma")
    assert launched == counted


@pytest.mark.parametrize(
    "name", ["float8", "group16_head_dim512", *further("group16_head_dim256", "head_dim96")]
)
def test_hoppers_kernel_takes_at_most_the_counted_bytes(name):
    launched, counted = attention(by_name(cases, name), "mosaic_gpu")
    assert counted - 8 * KB <= launched <= counted


@pytest.mark.parametrize("card", OF_A_CORE, ids=lambda card: card.kind)
def test_programs_per_core_fill_shared_memory(card, monkeypatch):
    """For the group that takes the most, because a plan does not know the group."""
    monkeypatch.setattr(dispatch, "_local_gpu", lambda: card)
    there_are = OF_A_CORE[card]
    for head_dim, page_size in itertools.product(HEAD_DIMS, PAGE_SIZES):
        case = replace(cases.BASE, head_dim=head_dim, page_size=page_size, group=16)
        q, rows = split_rows(structs(case))
        make = functools.partial(
            decode_plan,
            columns=4,
            page_size=page_size,
            head_dim=head_dim,
            dtype="bfloat16",
            implementation="mosaic_mma",
        )
        plan = jax.eval_shape(make, jax.ShapeDtypeStruct((3,), jnp.int32))
        tile, numbers = max(64, page_size), 0
        for shape in ((tile, head_dim), (tile, head_dim), (16, head_dim), (16, tile)):
            numbers += -(-np.prod(shape) // 512) * 512  # whole KB of 16-bit numbers
        each = 2 * int(numbers) + 2 * KB + KB
        fit = there_are // each
        assert (gpu.why_not_mma(q, rows, None) is None) == (fit > 0), case
        if fit:
            assert plan.programs == card.cores * min(MOST[head_dim], fit), (case, each)
