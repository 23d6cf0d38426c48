"""The rotation of the oracles: one plane by hand, and scores that depend only on distance."""

import chex
import numpy as np

from tests.oracles import rope


def test_dim_i_turns_with_dim_i_plus_half():
    # Planes (0, 2) at one radian a token and (1, 3) at base^(-1/2) = 0.1; position 2.
    cos, sin = rope.angles([2], 4, base=100.0)
    got = rope.rotate(np.array([[1.0, 0.0, 0.0, 3.0]]), cos, sin)
    chex.assert_trees_all_close(
        got,
        np.array([[np.cos(2), -3 * np.sin(0.2), np.sin(2), 3 * np.cos(0.2)]]),
        rtol=1e-7,
        atol=1e-15,
    )
