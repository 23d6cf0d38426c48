"""Keys and values in 8 bits: the numbers of the format, scales, and repeated quantization."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dms_jax.cache import Pool
from dms_jax.cache.quantization import FLOAT8, check_kv_dtype, dequantize, quantize, stored_vector
from dms_jax.errors import ConfigError
from tests.oracles import float8

put = jax.jit(quantize)
round_trip = jax.jit(lambda x: dequantize(*quantize(x), x.dtype))


def draws(seed: int, dtype) -> np.ndarray:
    random = np.random.default_rng(seed)
    size = 2.0 ** random.integers(-30, 30, size=(17, 1))
    return np.asarray(jnp.asarray(random.normal(size=(17, 8)) * size, dtype))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**20))
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_slots_hold_nearest_numbers(seed, dtype):
    x = draws(seed, dtype)
    values, scales = put(x)
    chex.assert_type([values, scales], [FLOAT8, jnp.float32])
    wide = x.astype(np.float64)
    chex.assert_trees_all_equal(scales, float8.scale_of(wide))
    stored = np.asarray(values).astype(np.float64) * np.asarray(scales)[:, None]
    chex.assert_trees_all_equal(stored, float8.snap(wide))
    chex.assert_trees_all_equal(np.asarray(round_trip(x)).astype(np.float64), stored)
    # A number not far below the largest of its slot keeps 3 bits.
    normal = np.abs(wide) >= 2.0**-6 * np.asarray(scales)[:, None]
    assert (np.abs(stored - wide)[normal] <= np.abs(wide)[normal] / 16).all()


def test_quantizing_again_changes_nothing():
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        x = jnp.asarray(draws(3, jnp.float32) / 2.0**16, dtype)
        once = round_trip(x)
        chex.assert_trees_all_equal(round_trip(once), once)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_largest_numbers_stay_finite_in_8_bits(dtype):
    largest = float(jnp.finfo(dtype).max)
    # 65504 would be rounded to 256 times a scale of 256, which float16 does not have.
    x = [[largest, 0], [-largest, largest / 3], [0.97 * largest, -0.98 * largest], [1, -1]]
    x = np.asarray(jnp.asarray(x, dtype))
    got = np.asarray(round_trip(jnp.asarray(x)))
    chex.assert_trees_all_equal(got.astype(np.float64), float8.snap(x))
    wide = x.astype(np.float64)
    assert (np.abs(got.astype(np.float64) - wide) <= np.abs(wide) / 16).all()
    chex.assert_trees_all_equal(round_trip(jnp.asarray(got)), got)


@pytest.mark.parametrize("number", [np.inf, -np.inf, np.nan])
def test_infinities_and_nan_stay_not_finite(number):
    assert jnp.isnan(round_trip(jnp.asarray([[number, 1.0]]))[0, 0])


def test_numbers_by_hand():
    # 448 fits a scale of 1 and 449 needs 2; between 16 and 32 the format has steps of 2.
    for first, scale in ((448.0, 1.0), (449.0, 2.0), (224.0, 0.5), (0.0, 2.0**-9)):
        assert put(jnp.asarray([[first, 0.0]]))[1] == scale
    chex.assert_trees_all_equal(
        round_trip(jnp.asarray([[448.0, 17.0, 19.0, 18.9, -17.1, 0.0]])),
        np.array([[448.0, 16.0, 20.0, 18.0, -18.0, 0.0]]),
    )
    zeros = jnp.zeros((1, 4))
    chex.assert_trees_all_equal(round_trip(zeros), zeros)
    tiny = jnp.full((1, 4), 1e-38)
    chex.assert_tree_all_finite(round_trip(tiny))
    # Devices flush subnormal float32 numbers to zero, and would divide by zero.
    small = jnp.full((1, 4), 2.0**-125)
    assert put(small)[1] == 2.0**-120
    chex.assert_trees_all_equal(round_trip(small), small)


def test_pool_returns_stored_numbers():
    random = np.random.default_rng(0)
    pages, page_size, head_dim = 6, 4, 8
    shape = (pages, page_size, head_dim)
    numbers, scale = stored_vector(head_dim, jnp.float32, "float8_e4m3")
    pages_of = jnp.zeros((*shape[:2], *numbers.shape), numbers.dtype)
    scales_of = jnp.full((*shape[:2], *scale.shape), jnp.nan, scale.dtype)
    pool = Pool(k_pages=pages_of, v_pages=pages_of, k_scales=scales_of, v_scales=scales_of)
    same = chex.assert_trees_all_equal
    table = jnp.asarray([[[4, 1, 6]]], jnp.int32)  # the third is no page
    slots = jnp.asarray([[[0, 5, -1]]], jnp.int32)
    k, v = random.normal(size=(2, 1, 3, 1, head_dim)).astype(np.float32)
    stored = [jax.jit(Pool.as_stored)(pool, x) for x in (k, v)]
    pool = jax.jit(Pool.store)(pool, table, slots, k, v)
    keys, values, rows = jax.jit(Pool.readable, static_argnums=2)(pool, table, jnp.float32)
    for got, given_ in ((keys, k), (values, v)):
        row = np.asarray(got)[np.asarray(rows)[0, 0]].reshape(-1, head_dim)
        same(row[[0, 5]], float8.snap(given_[0, :2, 0]).astype(np.float32))
    same(stored, [float8.snap(each).astype(np.float32) for each in (k, v)])
    same(pool.keys(jnp.asarray([1]), jnp.float32)[0, 1], keys[1, 1])
    same(pool.values(jnp.asarray([1]), jnp.asarray([1]), jnp.float32)[0], values[1, 1])
    # A pool in another dtype keeps numbers as they are and is read without a copy.
    plain = Pool(k_pages=jnp.zeros(shape), v_pages=jnp.zeros(shape))
    k = jnp.asarray(k)
    assert plain.as_stored(k) is k
    assert plain.readable(table, jnp.float32)[0] is plain.k_pages


def test_unknown_cache_dtypes_are_refused():
    assert stored_vector(8, jnp.bfloat16, None)[0].dtype == jnp.bfloat16
    assert stored_vector(8, jnp.bfloat16, "float8_e4m3")[0].dtype == FLOAT8
    with pytest.raises(ConfigError, match="'float8_e4m3', got 'int8'"):
        check_kv_dtype("int8")
