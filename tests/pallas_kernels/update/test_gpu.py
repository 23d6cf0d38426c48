"""The GPU kernels on a GPU: every case, bit by bit, in place, in large pools and in loops."""

import functools

import chex
import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import decode_attention, write_pages
from pallas_kernels.update import cases, gpu
from tests.pallas_kernels.support import as_arrays
from tests.pallas_kernels.update.support import (
    assert_agrees,
    operands,
    operation,
    write_inputs,
)

pytestmark = pytest.mark.gpu

POOL = ("k_pages", "v_pages", "k_scales", "v_scales")


def writer(case):
    """A compiled write that donates its pool."""
    run = functools.partial(operation(case), implementation="mosaic_gpu")
    return jax.jit(lambda pool, rest: run(**pool, **rest), donate_argnums=0)


@pytest.mark.parametrize("case", cases.CONTRACT, ids=lambda c: c.name)
def test_every_case_agrees_with_the_oracle(case):
    inputs = write_inputs(case, seed=11)
    arrays = as_arrays(inputs)
    assert gpu.why_not(*operands(arrays)) is None
    pool = {name: arrays.pop(name) for name in POOL if name in arrays}
    before = [x.unsafe_buffer_pointer() for x in pool.values()]
    got = writer(case)(pool, arrays)
    assert_agrees(case, inputs, got)
    assert [x.unsafe_buffer_pointer() for x in got[-len(before) :]] == before


def test_a_pool_of_more_than_two_to_the_31_elements():
    """The rows lie at the far end of a pool of 2.2e9 elements."""
    pages = 2_200_000_000 // (64 * 128)
    empty = jax.jit(lambda: jnp.zeros((pages, 64, 128), jnp.bfloat16))
    new = [jax.random.normal(jax.random.key(i), (3, 128), jnp.bfloat16) for i in range(2)]
    at = jnp.array([pages - 1, 0, pages - 7]), jnp.array([63, 5, 0])
    run = functools.partial(write_pages, implementation="mosaic_gpu")
    got = jax.jit(run, donate_argnums=(0, 1))(empty(), empty(), *new, *at)
    for after, values in zip(got, new, strict=True):
        chex.assert_trees_all_equal(after[at], values)
        assert int(jnp.count_nonzero(jnp.any(after != 0, axis=-1))) == 3


def test_attention_reads_the_preceding_write():
    """Kernels launched in quick succession in a loop: rows grow from empty to two pages."""
    rows, head_dim, size, steps = 24, 128, 64, 100
    k, v = (jax.random.normal(jax.random.key(i), (steps, rows, head_dim)) for i in range(2))
    q = jax.random.normal(jax.random.key(2), (steps, rows, 4, head_dim))
    q, k, v = (x.astype(jnp.bfloat16) for x in (q, k, v))
    table = jax.random.permutation(jax.random.key(3), 2 * rows).astype(jnp.int32).reshape(rows, 2)

    @functools.partial(jax.jit, static_argnums=0)
    def loop(implementation):
        pool = jnp.full((2 * rows, size, head_dim), jnp.nan, jnp.bfloat16)

        def step(carry, xs):
            index, q, k, v = xs
            offset = jnp.full((rows,), index % size, jnp.int32)
            page = jax.lax.dynamic_index_in_dim(table, index // size, 1, keepdims=False)
            carry = write_pages(*carry, k, v, page, offset, implementation=implementation)
            lengths = jnp.full((rows,), index + 1, jnp.int32)
            return carry, decode_attention(q, *carry, table, lengths, scale=0.1)

        return jax.lax.scan(step, (pool, pool), (jnp.arange(steps), q, k, v))[1]

    want = loop("xla")
    chex.assert_tree_all_finite(want.astype(jnp.float32))
    for _ in range(3):  # later runs of a program replay CUDA graphs
        chex.assert_trees_all_equal(loop("mosaic_gpu"), want)
