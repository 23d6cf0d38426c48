"""Float8 keys are multiplied unconverted: the split of queries, and the error bound of scores."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import decode_attention
from pallas_kernels.decode import cases, gpu
from tests.pallas_kernels.support import (
    by_name,
    lower_for_cuda,
    structs,
)


def test_float8_keys_are_not_converted():
    """Queries have three operands, which one XLA kernel writes."""
    case = by_name(cases, "float8")
    function = functools.partial(decode_attention, scale=0.1, implementation="mosaic_gpu")
    text = lower_for_cuda(function, **structs(case))
    assert f"tensor<3x{case.rows}x{case.group}x{case.head_dim}xf8E5M2>" in text
    assert "stablehlo.concatenate" not in text


def float8_spec(dtype):
    shapes = structs(by_name(cases, "float8"))
    q = jax.ShapeDtypeStruct(shapes["q"].shape, dtype)
    unused = {"tile": 64, "programs": 1, "scale": 1.0, "return_lse": True, "return_scores": True}
    return gpu.spec_of(q, shapes["k_pages"], {"stages": 1}, **unused)


def sum_of_operands(operands):
    """The queries by which the kernel multiplies keys, in float64."""
    return sum(np.asarray(part, np.float64) * 2.0 ** (-3 * i) for i, part in enumerate(operands))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_float8_operands_represent_every_query(dtype):
    """All 16-bit numbers: exact if the last bit is 2^-22 or more, otherwise within 2^-23.

    Beyond 57344, the largest number of an operand, the other operands hold the remainder: for
    float16 every number to three digits, for bfloat16 up to the sum of the largest numbers.
    """
    every = jax.lax.bitcast_convert_type(jnp.arange(1 << 16, dtype=jnp.uint16), dtype)
    exact = np.asarray(every, np.float64)
    exact = exact[~np.isnan(exact)]
    got = jax.jit(gpu.query_operands, static_argnums=1)(
        jnp.asarray(exact, dtype)[None, None], float8_spec(dtype)
    )
    assert got.dtype == jnp.float8_e5m2
    got = sum_of_operands(got)[0, 0]
    largest = float(jnp.finfo(jnp.float8_e5m2).max)
    small = np.abs(exact) <= largest
    kept = small & (np.fmod(np.where(small, exact, 0.0), 2.0**-22) == 0)
    chex.assert_trees_all_equal(got[kept], exact[kept])
    assert np.abs(got - exact)[small].max() <= 2.0**-23
    most = largest * (1 + 1 / 8 + 1 / 64)
    want = np.clip(exact, -most, most)
    assert (np.abs(got - want)[~small] <= 2.0**-9 * np.abs(want)[~small]).all()
    chex.assert_trees_all_equal(got[np.abs(exact) >= most], want[np.abs(exact) >= most])
    assert most > 0.998 * float(jnp.finfo(jnp.float16).max)
