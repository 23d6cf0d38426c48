"""The largest scores of each row: against NumPy, on every kind of row, and what is refused."""

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
from pallas_kernels.select import tpu as select_tpu
from pallas_kernels.select.gpu import select_largest_triton, why_not
from tests.pallas_kernels.support import lower_for_cuda

KINDS = ("distinct", "ties", "equal", "dead", "nothing", "extremes", "zeros")
gpu = pytest.mark.gpu


def draw(case: cases.SelectCase, kind: str) -> np.ndarray:
    """Scores [R, S]; the rows of a case differ."""
    rng = np.random.default_rng(len(case.name))
    shape = (case.rows, case.width)
    if kind == "distinct":
        x = rng.normal(size=shape)
    elif kind == "ties":
        x = rng.integers(-2, 3, size=shape)
    elif kind == "equal":
        x = np.repeat(rng.normal(size=(case.rows, 1)), case.width, 1)
    elif kind == "dead":  # as behind the length of a row, with a page that is always read
        x = np.where(
            np.arange(case.width) < rng.integers(1, case.width + 1), rng.normal(size=shape), -np.inf
        )
        x[:, rng.integers(case.width)] = np.inf
    elif kind == "nothing":
        x = np.full(shape, -np.inf)
    elif kind == "zeros":
        x = rng.choice([-0.0, 0.0], size=shape)
    else:
        tiny = np.array([1e-45, -1e-45, 3e-39, -3e-39])
        some = np.array([np.inf, -np.inf, 3e38, -3e38, 65504, -65504, 1e-7, -1e-7, 1, -1])
        x = rng.choice(np.concatenate([tiny, some]), size=shape)
    with np.errstate(over="ignore"):
        return x.astype(jnp.dtype(case.dtype))


def oracle(scores: np.ndarray, count: int) -> np.ndarray:
    """The largest by a stable sort of whole rows, then in the order of their places."""
    ranked = np.argsort(-scores.astype(np.float64), axis=-1, kind="stable")
    return np.sort(ranked[:, :count], -1)


@functools.cache
def interpreted(count: int):
    return jax.jit(functools.partial(select_largest_triton, count=count, interpret=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", cases.CONTRACT, ids=lambda case: case.name)
def test_the_interpreted_kernel_agrees_with_the_oracle(case, kind):
    scores = draw(case, kind)
    got = interpreted(case.count)(scores)
    chex.assert_trees_all_equal(got, oracle(scores, case.count))


# Many places of many chunks take long to interpret: a case for each.
TPU_CASES = [case for case in cases.CONTRACT if case.width * case.count < 1 << 25]


@pytest.mark.parametrize("case", TPU_CASES, ids=lambda case: case.name)
def test_the_interpreted_tpu_kernel_agrees_with_the_oracle(case):
    """Rows of all kinds at once: they share the rounds of the bisection."""
    scores = np.concatenate([draw(case, kind) for kind in KINDS])
    reason = select_tpu.why_not(scores, count=case.count)
    if case.dtype == "float16":
        assert reason is not None
        return
    assert reason is None
    run = functools.partial(select_tpu.select_largest_tpu, count=case.count, interpret=True)
    chex.assert_trees_all_equal(jax.jit(run)(scores), oracle(scores, case.count))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", cases.CONTRACT[:9], ids=lambda case: case.name)
def test_without_an_accelerator_it_is_xla(case, kind):
    scores = draw(case, kind)
    got = select_largest(jnp.asarray(scores), case.count)
    chex.assert_type(got, jnp.int32)
    chex.assert_trees_all_equal(got, oracle(scores, case.count))


@pytest.mark.parametrize("count", range(1, 8))
def test_both_zeros_are_one_number(count):
    scores = np.array([[-0.0, 0.0, -0.0, 0.0, -1, 1e-45, -1e-45]], np.float32)
    ranked = [5, 0, 1, 2, 3, 6, 4]
    want = np.array([sorted(ranked[:count])])
    chex.assert_trees_all_equal(interpreted(count)(scores), want)
    chex.assert_trees_all_equal(select_largest(jnp.asarray(scores), count), want)


@pytest.mark.parametrize("case", cases.BENCHMARK, ids=lambda case: case.name)
def test_it_lowers_for_a_gpu(case):
    text = lower_for_cuda(
        functools.partial(select_largest, count=case.count),
        scores=jax.ShapeDtypeStruct((case.rows, case.width), jnp.dtype(case.dtype)),
    )
    assert text.count("stablehlo.custom_call") == 1 + (case.width > 8192)
    assert "select_largest_triton" in text
    assert "top_k" not in text
    assert "stablehlo.sort" not in text


@pytest.mark.parametrize(
    ("card", "dtype", "width", "count", "kernel"),
    [
        (GPU("Tesla T4", 40, (7, 5)), "float32", 1000, 9, False),
        (GPU("NVIDIA A100-SXM4-40GB", 108, (8, 0)), "float32", 1000, 9, True),
        (DEFAULT_GPU, "bfloat16", 1000, 9, True),
        (DEFAULT_GPU, "float8_e4m3fn", 1000, 9, False),
        (DEFAULT_GPU, "float32", 8192, 8191, True),
        (DEFAULT_GPU, "float32", 8193, 2048, True),
        (DEFAULT_GPU, "float32", 8193, 2049, False),
    ],
)
def test_what_no_kernel_serves_is_left_to_xla(card, dtype, width, count, kernel, monkeypatch):
    monkeypatch.setattr(select_gpu, "target_gpu", lambda: card)
    text = lower_for_cuda(
        functools.partial(select_largest, count=count),
        scores=jax.ShapeDtypeStruct((4, width), jnp.dtype(dtype)),
    )
    assert ("select_largest_triton" in text) == kernel
    assert ("top_k" in text) != kernel


def test_why_it_is_not_served_is_said():
    assert why_not(jnp.zeros((1, 40000)), count=2048) is None
    with pytest.raises(NotImplementedError, match=r"3000 of 40000.*at most 2048"):
        select_largest(jnp.zeros((1, 40000)), 3000, implementation="triton")
    with pytest.raises(NotImplementedError, match="runs on cpu"):
        select_largest(jnp.zeros((1, 4)), 2, implementation="triton")


def test_what_the_tpu_kernel_does_not_serve_is_said():
    scores = jnp.zeros((1, 40000))
    with pytest.raises(NotImplementedError, match=r"at most 2048 .*not 3000"):
        select_largest(scores, 3000, implementation="mosaic_tpu")
    with pytest.raises(NotImplementedError, match="not float16"):
        select_largest(scores.astype(jnp.float16), 3, implementation="mosaic_tpu")
    assert "at most 131072" in str(select_tpu.why_not(jnp.zeros((1, 131073)), count=3))


def test_float64_stays_what_it_is():
    """Differences that float32 does not see."""
    with jax.enable_x64(True):
        scores = jnp.asarray(1 + 1e-12 * np.random.default_rng(0).normal(size=(2, 50)))
        got = select_largest(scores, 7)
        chex.assert_trees_all_equal(got, oracle(np.asarray(scores), 7))
        with pytest.raises(NotImplementedError, match="float64"):
            select_largest(scores, 7, implementation="triton")


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
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", [*cases.CONTRACT, *cases.BENCHMARK], ids=lambda case: case.name)
def test_the_kernel_on_a_gpu(case, kind):
    scores = draw(case, kind)
    run = functools.partial(select_largest, count=case.count)
    if case.count < case.width:
        run = functools.partial(run, implementation="triton")
    chex.assert_trees_all_equal(jax.jit(run)(scores), oracle(scores, case.count))
