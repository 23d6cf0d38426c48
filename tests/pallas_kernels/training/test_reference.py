"""The contract of `retrofit_attention`, checked on the XLA form against float64 NumPy."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import retrofit_attention
from pallas_kernels.training import cases
from pallas_kernels.training.api import check_arguments
from pallas_kernels.training.inputs import Inputs
from tests.pallas_kernels.support import sinks_of
from tests.pallas_kernels.training.support import (
    both,
    check,
    draw,
    in_pieces,
    operands,
    oracle,
)

BY_NAME = {case.name: case for case in cases.CONTRACT}


def attend(case, inputs, segments, implementation="xla", sinks=None):
    """Output and the gradients of q, k, v, bias and, if given, sinks."""
    arrays = {name: jnp.asarray(inputs[name]) for name in ("q", "k", "v", "bias", "do")}
    return jax.jit(both(case, implementation))(**arrays, segments=segments, sinks=sinks)


@pytest.mark.parametrize("case", cases.CONTRACT, ids=lambda case: case.name)
def test_every_case_agrees_with_the_oracle(case):
    inputs, segments = draw(case)
    results = attend(case, inputs, segments)
    chex.assert_type([*results[:4]], case.dtype)
    chex.assert_type(results[4], "float32")
    check(case, results, inputs, segments)


@pytest.mark.parametrize("case", cases.SINKS_AND_CAPS, ids=lambda case: case.name)
def test_sinks_and_soft_caps_agree_with_the_oracle(case):
    inputs, segments = draw(case)
    wide = case.dtype == "float64"
    with jax.enable_x64(wide):
        results = attend(case, inputs, segments, None, sinks_of(case))
        chex.assert_type([*results[:4]], case.dtype)
    check(case, results, inputs, segments, tolerance=1e-7 if wide else None)


def test_no_kernel_serves_a_soft_cap():
    inputs, _ = draw(BY_NAME["one_group"])
    arrays = [jnp.asarray(inputs[name]) for name in ("q", "k", "v", "bias")]
    with pytest.raises(NotImplementedError, match="a soft cap is served by xla alone"):
        retrofit_attention(*arrays, window=3, scale=1.0, soft_cap=2.0, implementation="mosaic_gpu")


@pytest.mark.parametrize("name", ["ragged", "packed", "evicted", "one_token"])
def test_float64_stays_float64(name):
    case = BY_NAME[name]
    inputs, segments = draw(case, dtype="float64")
    with jax.enable_x64(True):
        results = attend(case, inputs, segments)
        chex.assert_type([*results], "float64")
    check(case, results, inputs, segments, tolerance=1e-12)


@pytest.mark.parametrize("name", ["ragged", "packed"])
def test_a_row_in_pieces_equals_the_whole_row(name):
    """Queries from a place in the row attend to all keys, as in a row split over devices."""
    case = BY_NAME[name]
    inputs, segments = draw(case, dtype="float64")

    @jax.jit
    def run(piece, do):
        arrays = piece.q, piece.k, piece.v, piece.bias, do
        return both(case, "xla")(*arrays, piece.segments, piece.start)

    with jax.enable_x64(True):
        arrays, do = operands(inputs, segments), jnp.asarray(inputs["do"])
        results = in_pieces(arrays, do, run, (67, 134))
    check(case, results, inputs, segments, tolerance=1e-12)


def test_oracle_gradients_equal_finite_differences():
    """The oracle's gradients, against central differences of its output."""
    case = cases.TrainingCase("tiny", 1, 9, 2, 1, 4, 3, dtype="float64", segments=5)
    inputs, segments = draw(case)
    rng = np.random.default_rng(0)
    want = oracle(inputs, segments, case.window, 0.5)
    for name, gradient in zip(("q", "k", "v", "bias"), want[1:], strict=True):
        direction = rng.standard_normal(inputs[name].shape)
        ends = [
            np.sum(
                inputs["do"]
                * oracle(inputs | {name: inputs[name] + step * direction}, segments, 3, 0.5)[0]
            )
            for step in (1e-5, -1e-5)
        ]
        slope = (ends[0] - ends[1]) / 2e-5
        chex.assert_trees_all_close(slope, np.sum(gradient * direction), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": (1, 8, 3, 4)}, "beside"),
        ({"bias": (1, 8, 2)}, "bias must be"),
        ({"q": (1, 0, 4, 4), "k": (1, 0, 2, 4), "v": (1, 0, 2, 4)}, "empty"),
        ({"window": -1}, "window"),
        ({"segments": (1, 9)}, "segment_ids"),
    ],
)
def test_bad_input_is_refused(change, message):
    """The function's own checks, without the annotation check of pytest."""
    facts = {"q": (1, 8, 4, 4), "k": (1, 8, 2, 4), "v": (1, 8, 2, 4), "bias": (1, 2, 8)}
    facts |= {"window": 2, "segments": (1, 8)} | change
    q, k, v = (jax.ShapeDtypeStruct(facts[n], jnp.float32) for n in "qkv")
    bias = jax.ShapeDtypeStruct(facts["bias"], jnp.float32)
    segments = jax.ShapeDtypeStruct(facts["segments"], jnp.int32)
    with pytest.raises(ValueError, match=message):
        check_arguments(Inputs(q, k, v, bias, segments), facts["window"])


def test_sharded_equals_one_device():
    case = cases.TrainingCase("sharded", 4, 40, 8, 4, 8, 7, dtype="float32", segments=15)
    inputs, segments = draw(case)
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    heads, rows = jax.P("data", None, "model"), jax.P("data", "model")
    attention = jax.shard_map(
        lambda q, k, v, bias, segments: retrofit_attention(
            q, k, v, bias, window=7, scale=8**-0.5, segment_ids=segments
        ),
        mesh=mesh,
        in_specs=(heads, heads, heads, rows, jax.P("data")),
        out_specs=heads,
        check_vma=False,
    )

    @jax.jit
    def run(q, k, v, bias, do):
        output, pullback = jax.vjp(lambda *x: attention(*x, jnp.asarray(segments)), q, k, v, bias)
        return output, *pullback(do)

    results = run(*(jnp.asarray(inputs[name]) for name in ("q", "k", "v", "bias", "do")))
    check(case, results, inputs, segments)


def test_sequences_of_several_spans():
    case = dataclasses.replace(BY_NAME["float32_packed"], T=1500, D=8, segments=700, window=130)
    inputs, segments = draw(case)
    check(case, attend(case, inputs, segments), inputs, segments)
