"""Keys and values in 4 bits: the integers, their scales and bytes, the rotation, the pool."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dms_jax.cache.int4 import Int4, hadamard
from dms_jax.model.caching import entry_bytes, init_cache
from dms_jax.policies import Vanilla
from pallas_kernels.four_bits import pack, unpack
from tests.oracles import int4
from tests.support.models import tiny_config

FORMATS = [Int4(), Int4(group=None), Int4(group=4, rotated=False), Int4(group=None, rotated=False)]
every_format = pytest.mark.parametrize("stored", FORMATS, ids=str)


def draws(seed: int, head_dim: int = 24) -> np.ndarray:
    """Returns vectors of very different sizes, with one large dimension, and one of zeros."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(17, head_dim)) * 2.0 ** random.integers(-30, 30, size=(17, 1))
    x[:, 3] *= 50
    x[4] = 0
    return x


def put(stored: Int4, x) -> tuple[jax.Array, jax.Array]:
    return jax.jit(stored.quantize)(x)


@every_format
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**20))
def test_slots_hold_nearest_numbers(stored, seed):
    options = dataclasses.asdict(stored)
    with jax.enable_x64(True):
        x = draws(seed)
        packed, scales = put(stored, x)
        chex.assert_type([packed, scales], [jnp.uint8, jnp.bfloat16])
        codes, want = int4.quantize(x, **options)
        wide = np.asarray(scales, np.float64)
        chex.assert_trees_all_equal(wide, want)
        chex.assert_trees_all_equal(int4.unpack(packed), codes)
        read = np.asarray(stored.dequantize(packed, scales, jnp.float64))
        error = np.abs(read - int4.snap(x, **options)).max(-1)
        assert (error <= 1e-14 * np.abs(x).max(-1)).all()
    # Rounding moves a number by at most half a step; by a whole step where integer 8 is missing,
    # and by 1/32 more where the 8-bit scale was rounded down.
    rows = int4.turn(x) if stored.rotated else x
    rows = rows.reshape(*want.shape, -1)
    steps, step = rows / want[..., None], np.abs(want)[..., None]
    error = np.abs(codes.reshape(rows.shape) * want[..., None] - rows)
    assert (error <= step * np.where(steps > 7.5, 1 + 2.0**-5, 0.5)).all()
    # The step is a sixteenth of the range, up to the rounding of the scale.
    largest = np.abs(rows).max(-1)
    assert (step[..., 0] <= (1 + 2.0**-8) * np.maximum(largest / 8, 2.0**-120)).all()


def test_numbers_by_hand():
    plain = Int4(group=4, rotated=False)
    x = jnp.asarray([[8.0, 7.0, -3.4, -8.0, -16.0, 16.0, 5.1, 0.0]])
    packed, scales = put(plain, x)
    # -8 and 8 are as large: the negative one counts. 16 has no integer beside -16.
    chex.assert_trees_all_equal(scales, np.array([[1.0, 2.0]], jnp.bfloat16))
    chex.assert_trees_all_equal(unpack(packed), np.array([[7, 7, -3, -8, -8, 7, 3, 0]], np.int8))
    chex.assert_trees_all_equal(packed[0], np.array([15 + 0 * 16, 15 + 15 * 16, 5 + 11 * 16, 128]))
    want = np.array([[7.0, 7, -3, -8, -16, 14, 6, 0]])
    chex.assert_trees_all_equal(plain.dequantize(packed, scales, jnp.float32), want)
    # Where the extreme number is positive the scale is negative.
    packed, scales = put(plain, -x)
    chex.assert_trees_all_equal(scales, np.array([[1.0, 2.0]], jnp.bfloat16))
    assert put(plain, jnp.asarray([[8.0, 1, 2, 3]]))[1] == -1
    for small in (0.0, 1e-38, -1e-38):
        packed, scales = put(plain, jnp.full((1, 4), small))
        assert jnp.abs(scales) == 2.0**-120
        chex.assert_trees_all_close(
            plain.dequantize(packed, scales, jnp.float32), np.full((1, 4), small), atol=2.0**-120
        )
    codes = jnp.arange(-8, 8, dtype=jnp.int8)
    chex.assert_trees_all_equal(unpack(pack(codes)), codes)


@every_format
def test_infinities_and_nan_stay_not_finite(stored):
    for wrong in (np.inf, -np.inf, np.nan):
        x = jnp.ones((2, 64)).at[0, 3].set(wrong)
        read = stored.dequantize(*put(stored, x), jnp.float32)
        assert not jnp.isfinite(read[0]).all()
        assert jnp.isfinite(read[1]).all()


@pytest.mark.parametrize("head_dim", [2, 24, 64, 96, 128])
def test_rotation_preserves_products_and_inverts_itself(head_dim):
    random = np.random.default_rng(head_dim)
    q, k = jnp.asarray(random.normal(size=(2, 5, head_dim)), jnp.float32)
    rotated = Int4().rotate(q), Int4().rotate(k)
    chex.assert_trees_all_close(rotated[0], int4.turn(np.asarray(q)), atol=1e-6)
    chex.assert_trees_all_close((rotated[0] * rotated[1]).sum(-1), (q * k).sum(-1), atol=1e-4)
    chex.assert_trees_all_close(Int4().rotate(rotated[0]), q, atol=1e-6)
    size = head_dim & -head_dim
    chex.assert_trees_all_equal(hadamard(size), int4.hadamard(size))
    # One large dimension is spread evenly over its block.
    one = jnp.zeros(head_dim).at[1].set(8.0)
    spread = jnp.abs(Int4().rotate(one))[:size]
    chex.assert_trees_all_close(spread, np.full(size, 8 / size**0.5), atol=1e-6)
    chex.assert_trees_all_equal(Int4(rotated=False).rotate(q), q)


@pytest.mark.parametrize(("head_dim", "numbers", "groups"), [(8, 4, 1), (64, 32, 2), (80, 40, 5)])
def test_bytes_equal_those_of_the_arrays(head_dim, numbers, groups):
    config = dataclasses.replace(tiny_config(), head_dim=head_dim)
    each = 2 * (numbers + 2 * groups)
    assert entry_bytes(config, jnp.bfloat16, "int4") == each
    cache = init_cache(
        config, Vanilla(), num_sequences=1, num_pages=3, page_size=4, kv_dtype="int4"
    )
    held = [cache.pool.k_pages, cache.pool.v_pages, cache.pool.k_scales, cache.pool.v_scales]
    assert sum(x.nbytes for x in held) == 12 * each
    assert len(jax.tree.leaves(cache.pool)) == len(held)
