"""The Pallas kernels of training attention: interpreted, lowered and compiled with no device."""

from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import retrofit_attention
from pallas_kernels.training import cases, gpu, tpu
from pallas_kernels.training.inputs import Inputs
from tests.pallas_kernels.support import interpret, lower_for_cuda, poison_free_memory
from tests.pallas_kernels.training.support import check, draw, in_pieces, operands
from tests.pallas_kernels.training.test_reference import attend
from tests.support.ahead import compile_ahead
from tests.support.instances import further

BY_NAME = {case.name: case for case in cases.CONTRACT}


def structs(case, *, queries=None):
    """Shapes of q, k, v, bias, do and, if there are any, segment ids and place of the queries."""
    q, kv = (case.B, queries or case.T, case.H, case.D), (case.B, case.T, case.K, case.D)
    shapes = {"q": q, "k": kv, "v": kv, "do": q}
    arrays = {n: jax.ShapeDtypeStruct(s, jnp.dtype(case.dtype)) for n, s in shapes.items()}
    arrays["bias"] = jax.ShapeDtypeStruct((case.B, case.K, case.T), jnp.float32)
    if case.segments:
        arrays["segments"] = jax.ShapeDtypeStruct((case.B, case.T), jnp.int32)
    if queries:
        arrays["start"] = jax.ShapeDtypeStruct((), jnp.int32)
    return arrays


def both(case, implementation):
    """Forward and backward as one function of the arrays of `structs`."""

    def run(q, k, v, bias, do, segments=None, start=None):
        def forward(q, k, v, bias):
            return retrofit_attention(
                q,
                k,
                v,
                bias,
                window=case.window,
                scale=case.D**-0.5,
                segment_ids=segments,
                start=start,
                implementation=implementation,
            )

        output, pullback = jax.vjp(forward, q, k, v, bias)
        return output, pullback(do)

    return run


@pytest.mark.parametrize(
    "names",
    [["one_token"], *further((["plain", "packed", "odd_group", "dim_256", "packed:75"],))],
    ids=str,
)
def test_gpu_kernels_in_the_interpreter(names):
    """Slots reused and races looked for; packed and ragged; an odd group; D = 256."""
    lines = interpret(Path(__file__).with_name("interpreted.py"), *names)
    assert lines == [f"{name.partition(':')[0]} ok" for name in names]


@pytest.mark.parametrize(
    "name", ["float32_packed", *further("ragged", "packed", "packed in pieces")]
)
def test_tpu_kernels_in_the_interpreter(name):
    name, _, in_parts = name.partition(" ")
    case = BY_NAME[name]
    inputs, segments = draw(case)
    arrays, do = operands(inputs, segments), jnp.asarray(inputs["do"])
    parameters = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    options = {"window": case.window, "scale": case.D**-0.5, "interpret": parameters}

    def run(arrays, do):
        output, lse2 = tpu.forward(arrays, **options)
        assert not interpret_pallas_call.races.races_found
        gradients = tpu.backward(arrays, output, lse2, do, **options)
        assert not interpret_pallas_call.races.races_found
        return output, *gradients

    results = in_pieces(arrays, do, run, (75, 205)) if in_parts else run(arrays, do)
    check(case, results, inputs, segments)


@pytest.mark.parametrize(
    "name", ["packed", *further("odd_group", "sixteen_groups", "dim_96", "dim_256", "one_token")]
)
def test_gpu_kernels_lower(name):
    text = lower_for_cuda(both(BY_NAME[name], "mosaic_gpu"), **structs(BY_NAME[name]))
    assert text.count("stablehlo.custom_call @mosaic_gpu") >= 3


@pytest.mark.slow
def test_gpu_kernels_lower_for_a_piece_of_a_row():
    case = BY_NAME["packed"]
    text = lower_for_cuda(both(case, "mosaic_gpu"), **structs(case, queries=140))
    assert text.count("stablehlo.custom_call @mosaic_gpu") >= 3


@pytest.mark.slow
@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize(
    ("topology", "name"),
    [
        ("v5e:2x2", "plain"),
        ("v5p:2x2x1", "plain"),
        ("v6e:2x2", "plain"),
        ("v5e:2x2", "float32_wide"),
        ("v5p:2x2x1", "sixteen_groups"),
        ("v6e:2x2", "packed"),
        ("v6e:2x2", "dim_96"),
        ("v5p:2x2x1", "packed from a place"),
    ],
)
def test_tpu_kernels_compile(topology, name):
    wide = cases.TrainingCase("float32_wide", 1, 1024, 4, 2, 256, 100, dtype="float32")
    name, _, placed = name.partition(" ")
    case = BY_NAME.get(name, wide)
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    sharding = jax.sharding.SingleDeviceSharding(devices[0])
    arrays = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        structs(case, queries=140 if placed else None),
    )
    # None picks by the platform that is lowered for, which is not the one that traces.
    traced = jax.jit(lambda arrays: both(case, None)(**arrays)).trace(arrays)
    report = compile_ahead(traced.lower(lowering_platforms=("tpu",)), topology)
    assert report.text.count('custom_call_target="tpu_custom_call"') >= 3


@pytest.mark.slow
def test_the_platform_lowered_for_picks_the_kernel():
    case = BY_NAME["plain"]
    assert "mosaic_gpu" in lower_for_cuda(both(case, None), **structs(case))
    cpu = jax.jit(lambda arrays: both(case, None)(**arrays)).lower(structs(case)).as_text()
    assert "mosaic_gpu" not in cpu
    assert "tpu_custom_call" not in cpu


def test_float32_on_a_gpu_is_full_float32():
    case = BY_NAME["float32"]
    text = lower_for_cuda(both(case, None), **structs(case))
    assert "mosaic_gpu" not in text
    assert "HIGHEST" in text


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_a_bias_of_float64_has_its_gradient_in_float64(platform):
    case = BY_NAME["plain"]
    with jax.enable_x64(True):
        shapes = structs(case)
        shapes["bias"] = jax.ShapeDtypeStruct(shapes["bias"].shape, jnp.float64)
        traced = jax.jit(lambda arrays: both(case, None)(**arrays)).trace(shapes)
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        chex.assert_type(traced.out_info[1][3], jnp.float64)
    assert "mosaic_gpu" not in text
    assert "tpu_custom_call" not in text


@pytest.mark.parametrize(
    ("name", "implementation", "reason"),
    [
        ("float32", "mosaic_gpu", "bfloat16 operands alone, got float32"),
        ("plain", "mosaic_gpu", "lowered for cpu"),
        ("plain", ("mosaic_gpu", "mosaic_tpu"), "lowered for cpu"),
    ],
)
def test_a_named_implementation_fails_loudly(name, implementation, reason):
    case = BY_NAME[name]
    function = jax.jit(lambda arrays: both(case, implementation)(**arrays))
    with pytest.raises(NotImplementedError, match=reason):
        function.lower(structs(case))


def test_names_are_tried_in_order():
    case = BY_NAME["float32"]
    inputs, segments = draw(case)
    check(case, attend(case, inputs, segments, ["mosaic_gpu", "xla"]), inputs, segments)
    with pytest.raises(ValueError, match="cuda_core"):
        attend(case, inputs, segments, "cuda_core")


def test_reasons_name_the_limit():
    def reason(module, dtype="bfloat16", dim=64, heads=4, scale=1.0):
        q = jax.ShapeDtypeStruct((1, 8, heads, dim), jnp.dtype(dtype))
        k = jax.ShapeDtypeStruct((1, 8, 1, dim), jnp.dtype(dtype))
        bias = jax.ShapeDtypeStruct((1, 1, 8), jnp.float32)
        return module.why_not(Inputs(q, k, k, bias), window=1, scale=scale)

    for module in (gpu, tpu):
        assert reason(module) is None
        assert "320" in reason(module, dim=320)
        assert "float64" in reason(module, dtype="float64")
        assert "positive" in reason(module, scale=-1.0)
    assert "17" in reason(tpu, heads=17)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", [c for c in cases.CONTRACT if c.dtype == "bfloat16"], ids=lambda case: case.name
)
def test_every_case_on_the_card(case):
    inputs, segments = draw(case)
    poison_free_memory()
    results = attend(case, inputs, segments, "mosaic_gpu")
    check(case, results, inputs, segments)
    chex.assert_trees_all_equal(results, attend(case, inputs, segments, "mosaic_gpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["plain", "packed", "odd_group", "dim_256", "evicted"])
def test_a_row_in_pieces_on_the_card(name):
    case = BY_NAME[name]
    inputs, segments = draw(case)
    poison_free_memory()

    @jax.jit
    def run(arrays, do):
        options = {"window": case.window, "scale": case.D**-0.5}
        output, lse2 = gpu.forward(arrays, **options)
        return output, *gpu.backward(arrays, output, lse2, do, **options)

    cuts = (case.T // 4, case.T // 2 + 5)
    results = in_pieces(operands(inputs, segments), jnp.asarray(inputs["do"]), run, cuts)
    check(case, results, inputs, segments)
