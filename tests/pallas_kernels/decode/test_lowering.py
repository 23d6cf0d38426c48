"""Every GPU kernel lowers for an H200, up to the compiler stage that needs the card."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import decode_attention, decode_plan
from pallas_kernels.decode import cases
from pallas_kernels.decode.plan import make_plan
from tests.pallas_kernels.decode.served import refusal
from tests.pallas_kernels.support import lower_for_cuda, structs, with_all_results
from tests.support.instances import nightly_but

# One case of each feature, for the form with Ampere's products.
MMA = ("base", "group16_head_dim256", "head_dim96", "float8_page16", "group7_head_dim64_page16")


def lowered(case, implementation):
    return lower_for_cuda(with_all_results(implementation), **structs(case))


def kernel_of(case) -> tuple:
    """The properties that select a kernel; the number of rows and their lengths do not."""
    return case.group, case.head_dim, case.page_size, case.dtype, case.pages_dtype, case.rows == 1


KERNELS = list({kernel_of(case): case for case in reversed(cases.CONTRACT)}.values())[::-1]


# A case of each page dtype, and padded groups.
@pytest.mark.parametrize(
    "case",
    nightly_but([cases.by_name(x) for x in ("group12", "float32", "float8")], KERNELS),
    ids=lambda c: c.name,
)
def test_lowers_with_all_results(case):
    if (reason := refusal(case, "mosaic_gpu")) is not None:
        with pytest.raises(NotImplementedError, match=re.escape(reason)):
            lowered(case, "mosaic_gpu")
        return
    text = lowered(case, "mosaic_gpu")
    # The Hopper kernel's plan is also a kernel.
    assert text.count("stablehlo.custom_call") == 3
    assert "stablehlo.dot_general" not in text


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["float8", "float8_one_long_row", "float8_group8_head_dim64"])
def test_lowers_float8_in_tiles_of_two_pages(name):
    case = cases.by_name(name)
    shapes = structs(case)
    function = with_all_results("mosaic_gpu")

    def planned(lengths, **inputs):
        plan = make_plan(lengths, tile=128, programs=132)
        return function(**inputs, lengths=lengths, plan=plan)

    text = lower_for_cuda(planned, **shapes)
    assert text.count("stablehlo.custom_call") == 2
    assert f"tensor<{case.rows}x{-(-case.columns // 2) * 128}x8xf32>" in text


@pytest.mark.parametrize("name", nightly_but({"base"}, MMA))
def test_lowers_with_the_products_of_ampere(name):
    text = lowered(cases.by_name(name), "mosaic_mma")
    assert text.count("stablehlo.custom_call") == 2
    assert "stablehlo.dot_general" not in text


@pytest.mark.nightly
def test_no_array_operations_around_the_kernel():
    """For 16-bit dtypes only the plan, the kernel and the merge are launched."""
    case = cases.by_name("rows512_4096")
    text = lower_for_cuda(functools.partial(decode_attention, scale=0.1), **structs(case))
    for operation in ("stablehlo.pad", "stablehlo.transpose", "stablehlo.convert"):
        shapes = [line for line in text.splitlines() if operation in line and "bf16" in line]
        assert not shapes


@pytest.mark.nightly
def test_barriers_keep_the_merge_in_place():
    """In a scan over layers the plan is a slice and the result updates one."""
    case = cases.BASE
    shapes = structs(case)
    lengths = jax.ShapeDtypeStruct((3, case.rows), jnp.int32)

    def layers(lengths, **inputs):
        plans = decode_plan(
            lengths, columns=case.columns, page_size=64, head_dim=128, dtype=case.dtype
        )

        def layer(carry, step):
            out = decode_attention(**inputs, lengths=step[0], scale=0.1, plan=step[1])
            return carry, out

        return jax.lax.scan(layer, 0, (lengths, plans))[1]

    text = lower_for_cuda(layers, **(shapes | {"lengths": lengths}))
    # The aliased operands and results of the custom call are connected to barriers.
    lines = text.splitlines()
    (merge,) = [i for i, line in enumerate(lines) if "output_operand_aliases = [#" in line]
    assert "stablehlo.optimization_barrier" in lines[merge - 1]
    assert "stablehlo.optimization_barrier" in lines[merge + 1]
