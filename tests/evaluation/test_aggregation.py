"""Votes, likelihoods and pass@k against enumerations."""

import itertools
import math

import chex
import numpy as np
import pytest

from dms_jax.errors import DataError
from dms_jax.evaluation import likeliest, pass_at


@pytest.mark.parametrize("count", [1, 2, 4, 6])
def test_pass_at_is_the_mean_over_all_subsets(count):
    rng = np.random.default_rng(0)
    scores = np.stack([rng.integers(0, 2, 6), rng.random(6), np.ones(6), np.zeros(6)]).astype(float)
    want = [
        np.mean([max(subset) for subset in itertools.combinations(own, count)]) for own in scores
    ]
    chex.assert_trees_all_close(pass_at(scores, count), np.array(want), rtol=1e-12)


def test_pass_at_equals_the_usual_estimator():
    """1 - C(n - c, k) / C(n, k), also with coefficients far beyond float64."""
    right, drawn, count = 3, 2000, 700
    scores = np.zeros((1, drawn))
    scores[0, [5, 77, 1999]] = 1
    want = 1 - math.comb(drawn - right, count) / math.comb(drawn, count)
    assert pass_at(scores, count)[0] == pytest.approx(want, rel=1e-12)
    with pytest.raises(DataError, match="pass@4 cannot be estimated from 3 chains"):
        pass_at(np.zeros((1, 3)), 4)


@pytest.mark.parametrize(
    ("answers", "weights", "winner"),
    [
        (["7", None, "8"], [-2.0, -1.0, -1.5], 2),  # the likeliest has no answer
        (["7", "8"], [-1.0, -1.0], 0),  # a tie goes to the first
        ([None, None], [-1.0, -2.0], None),
    ],
)
def test_likeliest_answer(answers, weights, winner):
    assert likeliest(answers, np.array(weights)) == winner
