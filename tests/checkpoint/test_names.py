"""The layout of a parameter in a Hugging Face tensor: round trips and slices."""

import math

import chex
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dms_jax.checkpoint.names import Layout, Piece


@st.composite
def layouts(draw):
    """A layout over 1 to 4 dims in any order and grouping, a shape, and a slice of each dim."""
    dims = draw(st.permutations(range(draw(st.integers(1, 4)))))
    cuts = sorted(draw(st.sets(st.integers(1, len(dims) - 1)))) if len(dims) > 1 else []
    groups = tuple(
        tuple(dims[start:stop]) for start, stop in zip([0, *cuts], [*cuts, len(dims)], strict=True)
    )
    shape = tuple(draw(st.integers(1, 4)) for _ in dims)
    index = []
    for size in shape:
        start = draw(st.integers(0, size - 1))
        index.append(slice(start, draw(st.integers(start + 1, size))))
    return groups, shape, tuple(index)


@given(layouts())
def test_round_trip(case):
    groups, shape, _ = case
    layout = Layout("x", groups)
    parameter = np.arange(math.prod(shape)).reshape(shape)
    tensor = layout.to_tensor(parameter)
    chex.assert_shape(tensor, layout.tensor_shape(shape))
    assert tensor.flags.c_contiguous
    chex.assert_trees_all_equal(layout.to_parameter(tensor, shape), parameter)


@given(layouts())
def test_slices(case):
    groups, shape, index = case
    layout = Layout("x", groups)
    parameter = np.arange(math.prod(shape)).reshape(shape)
    cut, rest = layout.tensor_slices(shape, index)
    read = layout.to_tensor(parameter)[cut]
    chex.assert_trees_all_equal(layout.to_parameter(read, shape)[rest], parameter[index])


def test_heads_are_cut_in_the_file():
    layout = Layout("q", ((1, 2), (0,)))  # q_proj.kernel [E, H, D] in a tensor [H * D, E]
    every = slice(None)
    cut, _ = layout.tensor_slices((24, 4, 10), (every, slice(2, 4), every))
    assert cut == (slice(20, 40), slice(0, 24))


@pytest.mark.parametrize(
    ("part", "index", "there", "own"),
    [
        ((0, slice(3, 4)), slice(2, 4), slice(1, 2), slice(0, 1)),
        ((0, slice(3, 4)), slice(None), slice(3, 4), slice(0, 1)),
        ((0, slice(1, 2)), slice(2, 4), None, None),
        ((0, slice(0, -2)), slice(1, 5), slice(0, 3), slice(1, 4)),  # of 6
        ((0, slice(-1, None)), slice(3, 6), slice(2, 3), slice(0, 1)),
    ],
)
def test_overlap_of_a_piece_and_a_part(part, index, there, own):
    """Experts are pieces of one parameter, along an axis that a mesh may split."""
    piece, shape = Piece(Layout("x", ((0,), (1,))), (part,)), (6, 5)
    found = piece.within((index, slice(2, 4)), shape)
    if there is None:
        assert found is None
        return
    assert found == ((there, slice(0, 2)), (own, slice(2, 4)))
    whole = np.arange(30).reshape(shape)
    chex.assert_trees_all_equal(whole[index, 2:4][found[0]], whole[piece.index(2)][found[1]])
