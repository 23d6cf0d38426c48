"""Writing into the pool: every value reaches its slot and nothing else changes."""

import functools
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dms_jax.cache import Pool, compact, load, store
from dms_jax.cache import pool as paged
from dms_jax.model.rope import apply_rope
from dms_jax.policies import DMC, DMS, Vanilla

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
        [random.permutation(WIDTH * PAGE_SIZE + 3)[:TOKENS] for _ in range(BATCH * KV_HEADS)]
    ).reshape(BATCH, KV_HEADS, TOKENS)
    slots = np.where(random.random(slots.shape) < 0.3, -1, slots).astype(np.int32)
    want = pool.copy()
    for row, head, token in np.ndindex(slots.shape):
        slot = slots[row, head, token]
        if 0 <= slot < reserved[row, head] * PAGE_SIZE:
            page = table[row, head, slot // PAGE_SIZE]
            want[page, slot % PAGE_SIZE] = values[row, token, head]
    chex.assert_trees_all_equal(put(pool, table, slots, values), want)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, jnp.float8_e4m3fn], ids=np.dtype)
def test_writing_one_token_equals_writing_a_chunk(dtype):
    """Some rows store nothing, and one writes beyond its reserved pages."""
    random = np.random.default_rng(5)
    shape = (PAGES, PAGE_SIZE, HEAD_DIM)
    table = random.permutation(PAGES)[: BATCH * KV_HEADS * WIDTH].astype(np.int32)
    table = table.reshape(BATCH, KV_HEADS, WIDTH)
    table[0, 1, 2:] = PAGES
    slots = np.array([[[0], [7], [-1]], [[11], [5], [-1]]], np.int32)
    k, v = random.normal(size=(2, BATCH, 1, KV_HEADS, HEAD_DIM)).astype(np.float32)
    quantized = np.dtype(dtype).itemsize == 1
    scales = jnp.ones(shape[:2]) if quantized else None
    pool = Pool(
        k_pages=jnp.asarray(random.normal(size=shape), dtype),
        v_pages=jnp.asarray(random.normal(size=shape), dtype),
        k_scales=scales,
        v_scales=scales,
    )
    # A chunk of two tokens; the second one stores nothing.
    two = [np.concatenate([x, x], 1) for x in (k, v)]
    both = np.concatenate([slots, np.full_like(slots, -1)], -1)
    want = jax.jit(Pool.store)(pool, table, both, *two)
    got = jax.jit(Pool.store)(pool, table, slots, k, v)
    written = np.asarray(pool.k_pages != got.k_pages).any(-1).sum()
    assert written == 3
    chex.assert_trees_all_equal(got, want)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=np.dtype)
@pytest.mark.parametrize(
    "policy", [Vanilla(), DMS(window=4), DMC(neuron="first")], ids=lambda policy: policy.name
)
def test_fused_rotation_equals_rotating_first(policy, dtype):
    """The result equals rotating first and writing then."""
    random, head_dim, group = np.random.default_rng(6), 8, 2
    pages = jnp.asarray(random.normal(size=(2, PAGES, PAGE_SIZE, head_dim)), dtype)
    pool = Pool(k_pages=pages[0], v_pages=pages[1])
    table = random.permutation(PAGES)[: BATCH * KV_HEADS * WIDTH].astype(np.int32)
    table = jnp.asarray(table.reshape(BATCH, KV_HEADS, WIDTH))
    slots = jnp.array([[[0], [7], [-1]], [[11], [5], [-1]]], jnp.int32)
    q = jnp.asarray(random.normal(size=(BATCH, 1, KV_HEADS * group, head_dim)), dtype)
    k, v = jnp.asarray(random.normal(size=(2, BATCH, 1, KV_HEADS, head_dim)), dtype)
    angles = random.uniform(-3, 3, (BATCH, 1, head_dim // 2)).astype(np.float32)
    rotation = jnp.cos(angles), jnp.sin(angles)

    @jax.jit
    def both():
        turned = policy.clear_borrowed(q, k)
        turned = policy.clear_borrowed(*(apply_rope(x, *rotation) for x in turned))
        want = pool.store(table, slots, turned[1], v), turned[0]
        zeroed = policy.borrowed(group, head_dim)
        return want, pool.rotate_and_store(table, slots, q, k, v, rotation, zeroed=zeroed)

    want, got = both()
    eps = float(jnp.finfo(dtype).eps)  # compilers differ in the last bit
    chex.assert_trees_all_close(got, want, rtol=eps, atol=4 * eps)
    # Only the borrowed neurons of the queries are zero.
    zero = {(head, dim) for head, dim in policy.borrowed(group, head_dim) if head < group}
    found = np.argwhere(np.asarray(got[1] == 0).reshape(-1, group, head_dim))
    assert {(head, dim) for _, head, dim in found.tolist()} == zero
    assert len(found) == len(zero) * BATCH * KV_HEADS


def scattered_rows(random, lengths):
    """A pool, and a table whose rows have pages for their lengths."""
    table = random.permutation(PAGES)[: BATCH * KV_HEADS * WIDTH].reshape(BATCH, KV_HEADS, WIDTH)
    owned = np.arange(WIDTH) < -(-lengths // PAGE_SIZE)[..., None]
    return np.where(owned, table, PAGES).astype(np.int32)


def slots_of(pool, table, row, head, count):
    slots = np.arange(count)
    return pool[table[row, head, slots // PAGE_SIZE], slots % PAGE_SIZE]


@functools.cache
def compact_moving(pages):
    """`compact`, with a given number of pages per turn."""

    def moving(*args):
        with mock.patch.object(paged, "PAGES_MOVED", pages):
            return compact(*args)

    return jax.jit(moving)


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**20),
    share=st.sampled_from([0.0, 0.3, 0.8, 1.0]),
    pages=st.sampled_from([1, 3, paged.PAGES_MOVED]),
)
def test_compaction_keeps_order(seed, share, pages):
    """All arrays addressed by page move alike; other pages do not change."""
    random = np.random.default_rng(seed)
    lengths = random.integers(0, WIDTH * PAGE_SIZE + 1, (BATCH, KV_HEADS))
    table = scattered_rows(random, lengths)
    vectors = random.normal(size=(PAGES, PAGE_SIZE, HEAD_DIM)).astype(np.float32)
    numbers = random.integers(0, 100, (PAGES, PAGE_SIZE)).astype(np.int32)
    live = np.arange(WIDTH * PAGE_SIZE) < lengths[..., None]
    keep = live & (random.random(live.shape) < share)
    held = jax.jit(load)(vectors, table, lengths)
    after, left = compact_moving(pages)((vectors, numbers), table, keep)
    chex.assert_trees_all_equal(left, keep.sum(-1))
    for row, head in np.ndindex(BATCH, KV_HEADS):
        before = slots_of(vectors, table, row, head, lengths[row, head])
        chex.assert_trees_all_equal(held[row, head, : lengths[row, head]], before)
        assert not np.asarray(held[row, head, lengths[row, head] :]).any()
        for pool, moved in zip((vectors, numbers), after, strict=True):
            before = slots_of(pool, table, row, head, lengths[row, head])
            want = before[keep[row, head, : lengths[row, head]]]
            got = slots_of(np.asarray(moved), table, row, head, len(want))
            chex.assert_trees_all_equal(got, want)
    others = np.setdiff1d(np.arange(PAGES), table)
    chex.assert_trees_all_equal(np.asarray(after[0])[others], vectors[others])
