"""The training attention kernels, interpreted, lowered and compiled without a device."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental import topologies

from pallas_kernels import dispatch
from pallas_kernels.training import cases, gpu, mma, tpu
from pallas_kernels.training.inputs import Inputs
from tests.pallas_kernels.support import (
    interpret,
    launched_with,
    lower_for_cuda,
    on_the_card,
    poison_free_memory,
    tpu_interpreters,
)
from tests.pallas_kernels.training.support import (
    both,
    check,
    draw,
    in_pieces,
    operands,
    structs,
)
from tests.support.ahead import compile_ahead
from tests.support.instances import further

BY_NAME = {case.name: case for case in cases.CONTRACT}
GPU_MODULES = {"mosaic_gpu": gpu, "mosaic_mma": mma}


@pytest.mark.parametrize(
    ("implementation", "names"),
    [
        ("mosaic_gpu", ["one_token", "dim_256"]),
        ("mosaic_mma", ["odd_group"]),
        *further(
            ("mosaic_gpu", ["plain", "packed", "odd_group", "packed:75"]),
            ("mosaic_gpu", ["dim_256_packed:75"]),
            ("mosaic_mma", ["float16", "evicted", "dim_256", "packed:75"]),
        ),
    ],
    ids=str,
)
def test_gpu_kernels_in_the_interpreter(implementation, names):
    """Slot reuse and race detection; packed and ragged; an odd group; D = 256."""
    interpret("training", implementation, names)


@pytest.mark.parametrize(
    "name", ["float32_packed", *further("ragged", "packed", "packed in pieces", "dim_512")]
)
def test_tpu_kernels_in_the_interpreter(name):
    name, _, in_parts = name.partition(" ")
    # A piece has the same place in all sequences, so one sequence suffices.
    case = dataclasses.replace(BY_NAME[name], B=1) if in_parts else BY_NAME[name]
    inputs, segments = draw(case)
    arrays, do = operands(inputs, segments), jnp.asarray(inputs["do"])
    options = {"window": case.window, "scale": case.D**-0.5}

    def run(arrays, do, parameters):
        output, lse2 = tpu.forward(arrays, **options, interpret=parameters)
        assert not interpret_pallas_call.races.races_found
        gradients = tpu.backward(arrays, output, lse2, do, **options, interpret=parameters)
        assert not interpret_pallas_call.races.races_found
        return output, *gradients

    for parameters in tpu_interpreters():
        one = functools.partial(run, parameters=parameters)
        results = in_pieces(arrays, do, one, (75, 205)) if in_parts else one(arrays, do)
        check(case, results, inputs, segments)


@pytest.mark.nightly
@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize(
    ("topology", "name"),
    [
        ("v5e:2x2", "plain"),
        ("v6e:2x2", "plain"),
        ("v5e:2x2", "float32_wide"),
        ("v5p:2x2x1", "sixteen_groups"),
        ("v6e:2x2", "packed"),
        ("v6e:2x2", "dim_96"),
        ("v5e:2x2", "dim_512"),
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
    # None selects by the lowering platform, which differs from the tracing one.
    traced = jax.jit(lambda arrays: both(case, None)(**arrays)).trace(arrays)
    report = compile_ahead(traced.lower(lowering_platforms=("tpu",)), topology)
    assert report.text.count('custom_call_target="tpu_custom_call"') >= 3


def test_float16_on_hopper_runs_amperes_kernels():
    """The others refuse it."""
    case = BY_NAME["float16"]
    assert len(launched_with(dispatch.DEFAULT_GPU, both(case, None), **structs(case))) == 3


def test_float32_on_a_gpu_is_full_float32():
    case = BY_NAME["float32"]
    text = lower_for_cuda(both(case, None), **structs(case))
    assert "mosaic_gpu" not in text
    assert "HIGHEST" in text


def test_reasons_name_the_limit():
    def reason(module, dtype="bfloat16", dim=64, heads=4, scale=1.0):
        q = jax.ShapeDtypeStruct((1, 8, heads, dim), jnp.dtype(dtype))
        k = jax.ShapeDtypeStruct((1, 8, 1, dim), jnp.dtype(dtype))
        bias = jax.ShapeDtypeStruct((1, 1, 8), jnp.float32)
        return module.why_not(Inputs(q, k, k, bias), window=1, scale=scale)

    for module in (gpu, mma, tpu):
        assert reason(module) is None
        assert "320" in reason(module, dim=320)
        assert "float64" in reason(module, dtype="float64")
        assert "positive" in reason(module, scale=-1.0)
    for dtype in ("float16", "float32"):
        assert f"bfloat16 operands alone, got {dtype}" in reason(gpu, dtype=dtype)
    assert "multiplies 16-bit numbers, not float32" in reason(mma, dtype="float32")
    assert "17" in reason(tpu, heads=17)


@pytest.mark.gpu
@pytest.mark.parametrize(("implementation", "case"), on_the_card(cases.CONTRACT))
def test_every_case_on_the_card(implementation, case):
    inputs, segments = draw(case)
    arrays = {name: jnp.asarray(inputs[name]) for name in ("q", "k", "v", "bias", "do")}
    run = functools.partial(jax.jit(both(case, implementation)), **arrays, segments=segments)
    poison_free_memory()
    results = run()
    check(case, results, inputs, segments)
    chex.assert_trees_all_equal(results, run())


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", GPU_MODULES)
@pytest.mark.parametrize("name", ["plain", "packed", "odd_group", "dim_256", "evicted"])
def test_a_row_in_pieces_on_the_card(implementation, name):
    case, module = BY_NAME[name], GPU_MODULES[implementation]
    inputs, segments = draw(case)
    poison_free_memory()

    @jax.jit
    def run(arrays, do):
        options = {"window": case.window, "scale": case.D**-0.5}
        output, lse2 = module.forward(arrays, **options)
        return output, *module.backward(arrays, output, lse2, do, **options)

    cuts = (case.T // 4, case.T // 2 + 5)
    results = in_pieces(operands(inputs, segments), jnp.asarray(inputs["do"]), run, cuts)
    check(case, results, inputs, segments)
