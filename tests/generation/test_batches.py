"""The batch of a program: what has no place in it."""

import numpy as np
import pytest

from dms_jax.generation.prefill import Shape
from dms_jax.generation.runner import build_batch


def test_tokens_that_have_no_place_are_refused():
    tokens = {0: np.arange(5), 2: np.arange(4)}
    given = dict(num_lanes=3, fixed_lanes=False)
    assert build_batch(tokens, shape=Shape(5, 2, 9, True), **given)[2].tolist() == [5, 4]
    with pytest.raises(ValueError, match="9 tokens have no room in a program with 8 places"):
        build_batch(tokens, shape=Shape(5, 2, 8, True), **given)
