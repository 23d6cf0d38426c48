"""The rotation of the oracles: one plane by hand, and what only depends on distance."""

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


def test_scores_depend_on_distance_alone():
    random = np.random.default_rng(0)
    q, k = random.normal(size=(2, 1, 6))
    scores = []
    for shift in (0, 17):
        q_cos, q_sin = rope.angles([9 + shift], 6)
        k_cos, k_sin = rope.angles([4 + shift], 6)
        scores.append((rope.rotate(q, q_cos, q_sin) * rope.rotate(k, k_cos, k_sin)).sum())
    chex.assert_trees_all_close(scores[0], scores[1], rtol=1e-12)
    assert abs(scores[0] - (q * k).sum()) > 1e-3
