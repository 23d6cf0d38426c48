"""Writing into the pool: every value where its slot lies, and nowhere else."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dms_jax.cache import store

BATCH, KV_HEADS, TOKENS, HEAD_DIM = 2, 3, 4, 2
PAGES, PAGE_SIZE, WIDTH = 30, 3, 4
put = jax.jit(store)


@settings(max_examples=25)
@given(seed=st.integers(0, 2**20))
def test_values_land_in_their_slots(seed):
    random = np.random.default_rng(seed)
    pool = random.normal(size=(PAGES, PAGE_SIZE, HEAD_DIM)).astype(np.float32)
    table = random.permutation(PAGES)[: BATCH * KV_HEADS * WIDTH]
    table = table.reshape(BATCH, KV_HEADS, WIDTH).astype(np.int32)
    reserved = random.integers(0, WIDTH + 1, (BATCH, KV_HEADS))
    table = np.where(np.arange(WIDTH) < reserved[..., None], table, PAGES).astype(np.int32)
    values = random.normal(size=(BATCH, TOKENS, KV_HEADS, HEAD_DIM)).astype(np.float32)
    slots = np.stack(
        [random.permutation(WIDTH * PAGE_SIZE)[:TOKENS] for _ in range(BATCH * KV_HEADS)]
    ).reshape(BATCH, KV_HEADS, TOKENS)
    slots = np.where(random.random(slots.shape) < 0.3, -1, slots).astype(np.int32)
    want = pool.copy()
    for row, head, token in np.ndindex(slots.shape):
        slot = slots[row, head, token]
        if 0 <= slot < reserved[row, head] * PAGE_SIZE:
            page = table[row, head, slot // PAGE_SIZE]
            want[page, slot % PAGE_SIZE] = values[row, token, head]
    np.testing.assert_array_equal(put(pool, table, slots, values), want)


def test_a_slot_beyond_the_table_is_not_written():
    pool = jnp.zeros((2, 2, 1))
    slots = jnp.full((1, 1, 1), 9, jnp.int32)
    after = put(pool, jnp.zeros((1, 1, 2), jnp.int32), slots, jnp.ones((1, 1, 1, 1)))
    assert not np.asarray(after).any()


def test_values_take_the_type_of_the_pool():
    pool = jnp.zeros((1, 2, 1), jnp.bfloat16)
    table, slots = jnp.zeros((1, 1, 1), jnp.int32), jnp.zeros((1, 1, 1), jnp.int32)
    after = put(pool, table, slots, jnp.full((1, 1, 1, 1), 1.5))
    assert after.dtype == jnp.bfloat16
    assert after[0, 0, 0] == 1.5
