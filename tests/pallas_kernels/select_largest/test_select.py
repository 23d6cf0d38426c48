"""The largest scores of each row against NumPy, on every kind of row; refusals."""

import functools
import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import select_largest
from pallas_kernels.dispatch import DEFAULT_GPU, GPU
from pallas_kernels.select import cases
from pallas_kernels.select import gpu as select_gpu
from pallas_kernels.select.gpu import why_not
from tests.pallas_kernels.select_largest.support import KINDS, draw, oracle
from tests.pallas_kernels.support import interpret, lower_for_cuda
from tests.support.instances import further

gpu = pytest.mark.gpu


@pytest.mark.parametrize(
    "names",
    [["width1000"], *further((["two", "pages512", "bfloat16", "longest", "many_of_longer"],))],
    ids=str,
)
def test_gpu_kernel_in_the_interpreter(names):
    interpret("select", "mosaic_gpu", names)


@pytest.mark.parametrize("case", cases.CONTRACT[:9], ids=lambda case: case.name)
def test_without_an_accelerator_it_is_xla(case):
    for kind in KINDS:
        scores = draw(case, kind)
        got = select_largest(jnp.asarray(scores), case.count)
        chex.assert_type(got, jnp.int32)
        chex.assert_trees_all_equal(got, oracle(scores, case.count), custom_message=kind)


@pytest.mark.parametrize(
    ("card", "dtype", "width", "count", "kernel"),
    [
        (GPU("Tesla T4", 40, (7, 5)), "float32", 1000, 9, False),
        (GPU("NVIDIA A100-SXM4-40GB", 108, (8, 0)), "float32", 1000, 9, True),
        (DEFAULT_GPU, "bfloat16", 1000, 9, True),
        (DEFAULT_GPU, "float8_e4m3fn", 1000, 9, False),
        *further(
            (DEFAULT_GPU, "float32", 8192, 8191, True), (DEFAULT_GPU, "float32", 8193, 2048, True)
        ),
        (DEFAULT_GPU, "float32", 8193, 2049, False),
    ],
)
def test_xla_serves_unsupported_shapes(card, dtype, width, count, kernel, monkeypatch):
    monkeypatch.setattr(select_gpu, "target_gpu", lambda: card)
    text = lower_for_cuda(
        functools.partial(select_largest, count=count),
        scores=jax.ShapeDtypeStruct((4, width), jnp.dtype(dtype)),
    )
    assert ("mosaic_gpu" in text) == kernel
    assert ("top_k" in text) != kernel


def test_refusals_name_the_limit():
    assert why_not(jnp.zeros((1, 40000)), count=2048) is None
    with pytest.raises(NotImplementedError, match=r"3000 of 40000.*at most 2048"):
        select_largest(jnp.zeros((1, 40000)), 3000, implementation="mosaic_gpu")
    with pytest.raises(NotImplementedError, match="runs on cpu"):
        select_largest(jnp.zeros((1, 4)), 2, implementation="mosaic_gpu")


def test_float64_is_exact():
    """Differences below float32's resolution."""
    with jax.enable_x64(True):
        scores = jnp.asarray(1 + 1e-12 * np.random.default_rng(0).normal(size=(2, 50)))
        got = select_largest(scores, 7)
        chex.assert_trees_all_equal(got, oracle(np.asarray(scores), 7))
        with pytest.raises(NotImplementedError, match="float64"):
            select_largest(scores, 7, implementation="mosaic_gpu")


def test_bad_input_is_refused():
    unchecked = inspect.unwrap(select_largest)
    scores = jnp.zeros((2, 5))
    for bad in (scores[0], scores[None], scores.astype(jnp.int32)):
        with pytest.raises(ValueError, match="must be floating-point"):
            unchecked(bad, 1)
    for count in (0, 6, -1, 2.0, True):
        with pytest.raises(ValueError, match=r"1\.\.5"):
            unchecked(scores, count)
    with pytest.raises(ValueError, match=r"1\.\.0"):
        unchecked(scores[:, :0], 1)
    chex.assert_shape(select_largest(scores[:0], 3), (0, 3))


@gpu
@pytest.mark.parametrize("case", [*cases.CONTRACT, *cases.BENCHMARK], ids=lambda case: case.name)
def test_the_kernel_on_a_gpu(case):
    run = functools.partial(select_largest, count=case.count)
    if case.count < case.width:
        run = functools.partial(run, implementation="mosaic_gpu")
    run = jax.jit(run)
    for kind in KINDS:
        scores = draw(case, kind)
        chex.assert_trees_all_equal(run(scores), oracle(scores, case.count), custom_message=kind)
