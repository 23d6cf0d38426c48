"""The largest numbers of a row, against sorting it."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dms_jax.ranking import mark_largest, marked_first

ROWS, WIDTH = 4, 23
# Few different numbers, so that many are equal; -0.0 equals 0.0, and so do subnormal numbers on
# some devices.
NUMBERS = (-np.inf, -3.0, -1.0, -0.0, 0.0, 2e-38, 1.0, 2.5, 1e30, np.inf)
mark, order_of = jax.jit(mark_largest), jax.jit(marked_first)


def sorted_first(scores, count):
    """Marks the `count` largest of each row; among equal scores the first ones."""
    order = np.argsort(-scores.astype(np.float64), axis=-1, kind="stable")
    marks = np.zeros(scores.shape, bool)
    for row, best in enumerate(order):
        marks[row, best[: count[row]]] = True
    return marks


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@given(seed=st.integers(0, 2**20))
def test_marks_equal_those_of_a_sort(dtype, seed):
    random = np.random.default_rng(seed)
    with jax.enable_x64(dtype == "float64"):
        scores = jnp.asarray(random.choice(NUMBERS, (ROWS, WIDTH)), dtype)
        count = random.integers(1, WIDTH + 1, ROWS).astype(np.int32)
        marks = np.asarray(mark(scores, count))
    chex.assert_trees_all_equal(marks, sorted_first(np.asarray(scores), count))


def test_short_row_is_marked_whole():
    chex.assert_trees_all_equal(
        np.asarray(mark_largest(jnp.asarray([[1.0, 3.0], [2.0, -jnp.inf]]), jnp.asarray([9, 9]))),
        np.ones((2, 2), bool),
    )


@given(seed=st.integers(0, 2**20), share=st.sampled_from([0.0, 0.3, 1.0]))
def test_partition_is_stable(seed, share):
    marks = np.random.default_rng(seed).random((2, ROWS, WIDTH)) < share
    want = np.argsort(~marks, axis=-1, kind="stable")
    chex.assert_trees_all_equal(np.asarray(order_of(marks)), want.astype(np.int32))
