"""The XLA implementation against float64 NumPy, and the contract of `decode_attention`."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import decode_attention
from pallas_kernels.decode import cases
from tests.pallas_kernels.support import (
    TOLERANCE,
    as_arrays,
    by_name,
    decode_inputs,
    decode_oracle,
    relative_error,
)

SCALE = 0.11


def attend(inputs, **options):
    options = {"scale": SCALE, "implementation": "xla"} | options
    return jax.jit(lambda arrays: decode_attention(**arrays, **options))(as_arrays(inputs))


@pytest.mark.parametrize("case", cases.CONTRACT + cases.XLA_ONLY, ids=lambda c: c.name)
def test_every_case_agrees_with_the_oracle(case):
    inputs = decode_inputs(case)
    with jax.enable_x64(case.dtype == "float64"):
        out, lse, scores = attend(inputs, return_lse=True, return_scores=True)
        wide = "float64" if case.dtype == "float64" else "float32"
        chex.assert_type([out, lse, scores], [case.dtype, wide, wide])
    want_out, want_lse, want_scores = decode_oracle(inputs, SCALE)
    assert relative_error(out, want_out) <= TOLERANCE[case.dtype]
    # XLA's float8 form rounds scaled keys to bfloat16.
    tolerance = 1e-2 if case.pages_dtype else min(TOLERANCE[case.dtype], 1e-5)
    assert relative_error(lse, want_lse) <= tolerance
    assert relative_error(scores, want_scores) <= tolerance


@pytest.mark.parametrize("case", cases.SINKS_AND_CAPS, ids=lambda c: c.name)
def test_sinks_and_soft_caps_agree_with_the_oracle(case):
    inputs, sinks = decode_inputs(case), None
    if case.sinks:
        sinks = np.linspace(-2.0, 3.0, case.rows * case.group).reshape(case.rows, case.group)
    options = dict(soft_cap=case.soft_cap, implementation=None)
    with jax.enable_x64(case.dtype == "float64"):
        own = (
            None if sinks is None else jnp.asarray(sinks, jnp.promote_types(case.dtype, "float32"))
        )
        out, lse, scores = attend(inputs, sinks=own, return_lse=True, return_scores=True, **options)
        alone = attend(inputs, sinks=own, **options)
    want_out, want_lse, want_scores = decode_oracle(
        inputs, SCALE, sinks=sinks, soft_cap=case.soft_cap
    )
    assert relative_error(out, want_out) <= TOLERANCE[case.dtype]
    tolerance = min(TOLERANCE[case.dtype], 1e-5)
    assert relative_error(lse, want_lse) <= tolerance
    assert relative_error(scores, want_scores) <= tolerance
    chex.assert_trees_all_equal(alone, out)


def test_no_kernel_serves_a_soft_cap():
    inputs = decode_inputs(by_name(cases, "head_dim8"))
    with pytest.raises(NotImplementedError, match="a soft cap is served by xla alone"):
        attend(inputs, soft_cap=1.0, implementation="mosaic_mma")


@pytest.mark.parametrize(("lse", "scores"), [(True, False), (False, True), (False, False)])
def test_only_requested_results_are_returned_in_order(lse, scores):
    inputs = decode_inputs(by_name(cases, "head_dim8"))
    everything = attend(inputs, return_lse=True, return_scores=True)
    some = attend(inputs, return_lse=lse, return_scores=scores)
    if not lse and not scores:
        chex.assert_trees_all_equal(some, everything[0])
        return
    chex.assert_trees_all_equal(some, (everything[0], everything[1] if lse else everything[2]))


def test_no_copy_of_the_pool():
    """Rows are gathered once for keys and once for values; the pool is never copied."""
    case = cases.DecodeCase("copies", (40, 33), head_dim=64, spare_pages=1000)
    arrays = as_arrays(decode_inputs(case))

    def run(arrays):
        return decode_attention(**arrays, scale=SCALE, implementation="xla")

    text = jax.jit(run).lower(arrays).compile()
    pool = arrays["k_pages"].nbytes
    assert text.memory_analysis().temp_size_in_bytes < pool / 4


def _changed(**changes):
    inputs = decode_inputs(by_name(cases, "head_dim8"))
    for name, change in changes.items():
        inputs[name] = change(inputs[name]) if callable(change) else change
    return inputs


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": lambda q: q[0]}, "q must have 3 axes"),
        ({"q": lambda q: q[..., :-1]}, "head dim"),
        ({"lengths": lambda n: n[:-1]}, "same number of rows"),
        ({"lengths": lambda n: n.astype(np.float32)}, "must hold integers"),
        ({"k_scales": np.ones((3, 16), np.float32)}, "scales belong to float8"),
    ],
)
def test_bad_arguments_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        unchecked(**as_arrays(_changed(**changes)), scale=SCALE)


def test_float8_pages_need_scales():
    inputs = decode_inputs(by_name(cases, "float8"))
    del inputs["v_scales"]
    with pytest.raises(ValueError, match="float8 pages need v_scales"):
        attend(inputs)


def test_a_traced_scale_is_refused():
    inputs = as_arrays(decode_inputs(by_name(cases, "head_dim8")))
    with pytest.raises(ValueError, match="scale must be a number"):
        jax.jit(lambda scale: unchecked(**inputs, scale=scale))(0.5)


# Under pytest the annotation check would precede the function's own messages.
unchecked = getattr(decode_attention, "__wrapped__", decode_attention)
