"""Means, errors, votes and frontiers on cases worked out by hand."""

import itertools
import json
import math

import chex
import numpy as np
import pytest

from dms_jax.errors import DataError
from dms_jax.evaluation import (
    Measured,
    average_gain,
    difference,
    frontier,
    majority,
    mean_over_problems,
    mean_over_seeds,
    pass_at,
    percent,
    standard_error,
)


def test_errors_are_clustered_by_problem():
    # Problem means 1, 0, 0.5: standard deviation 0.5 over n - 1. The chains of a problem agree.
    scores = np.array([[1.0, 1, 1, 1], [0, 0, 0, 0], [1, 0, 1, 0]])
    measured = mean_over_problems(scores)
    assert measured.value == 0.5
    assert measured.error == pytest.approx(0.5 / math.sqrt(3))


def test_error_of_one_problem_is_unknown():
    """It is not 0, which would make any difference significant."""
    assert math.isnan(standard_error(np.array([3.0])))
    alone = mean_over_problems(np.array([[1.0, 0.5]]))
    assert alone.value == 0.75
    seeds = mean_over_seeds(np.array([[0.5], [1.0]]))
    gap = difference(np.array([[1.0]]), np.array([[0.25]]))
    for measured in (alone, seeds, gap):
        assert math.isnan(measured.error)
        assert not measured.beyond()
        assert not measured.beyond(-9)
        assert str(measured) == "0.750 ± unknown"
        assert json.loads(json.dumps(measured.to_list())) == [0.75, None]
        assert percent(measured.to_list()) == "75.0 ± unknown"


def test_seeds_add_to_the_error():
    # Means over seeds 0, 0.5, 1: problems' error 0.5 / sqrt(3). Seed means 2/3 and 1/3:
    # standard deviation sqrt(2 / 36), over two seeds sqrt(1 / 36).
    values = np.array([[0.0, 1, 1], [0, 0, 1]])
    measured = mean_over_seeds(values)
    assert measured.value == 0.5
    assert measured.error == pytest.approx(math.sqrt(1 / 12 + 1 / 36))
    # With one seed its own variance is unknown and left out.
    assert mean_over_seeds(values[:1]).error == pytest.approx(math.sqrt(1 / 9))


def test_differences_are_paired_by_problem():
    left = np.array([[1.0, 0, 1, 1]])
    right = np.array([[1.0, 0, 0, 1]])
    measured = difference(left, right)
    assert measured.value == 0.25
    assert measured.error == pytest.approx(0.25)  # gaps 0 0 1 0: s = 0.5, n = 4
    same = difference(left, left)
    assert (same.value, same.error) == (0, 0)
    # Seed means 1 and 0.5 against one seed: variance (0.125) / 2 is added; gaps 0.5, 0.
    two = difference(np.array([[1.0, 1], [1, 0]]), np.array([[0.5, 0.5]]))
    assert two.value == 0.25
    assert two.error == pytest.approx(math.sqrt(0.25**2 + 0.25**2))
    with pytest.raises(DataError, match="4 and 2"):
        difference(left, right[:, :2])


def test_seeds_of_both_sides_add_to_a_difference():
    """Seed means 1 and 0 against 0.75 and 0.25: variances of the means 0.25 and 0.0625."""
    left, right = np.array([[1.0, 1], [0, 0]]), np.array([[1.0, 0.5], [0.5, 0]])
    # Means over seeds 0.5, 0.5 and 0.75, 0.25: gaps -0.25 and 0.25, error 0.25.
    there, back = difference(left, right), difference(right, left)
    assert (there.value, back.value) == (0, 0)
    want = math.sqrt(0.25**2 + 0.25 + 0.0625)
    assert there.error == pytest.approx(want)
    assert back.error == pytest.approx(want)


def test_beyond_counts_errors_above_a_threshold():
    assert Measured(0.5, 0.2).beyond()
    assert not Measured(0.5, 0.25).beyond()
    assert Measured(-0.01, 0.004).beyond(-0.02)
    assert str(Measured(0.5, 0.25)) == "0.500 ± 0.250"


@pytest.mark.parametrize(
    ("answers", "winner"),
    [
        (["7", "8", "8"], 1),
        (["7", "8", "8", "7"], 0),  # a tie goes to the first seen
        ([None, None, "3"], 2),  # no answer is no vote
        ([None, None], None),
        ([], None),
    ],
)
def test_votes(answers, winner):
    assert majority(answers) == winner


def test_frontier_is_pareto_optimal():
    points = [(3, 0.4), (1, 0.2), (4, 0.6), (2, 0.5), (4, 0.55), (5, 0.6)]
    assert frontier(points) == [(1, 0.2), (2, 0.5), (4, 0.6)]
    assert frontier([]) == []


def test_average_gain_integrates_linear_frontiers():
    # Left: 0 at 1 to 1 at 3. Right: 0.5 at 2 to 0.5 at 4 (flat). Common: 2 to 3, left 0.5 to 1.
    assert average_gain([(1, 0.0), (3, 1.0)], [(2, 0.5), (4, 0.5)]) == pytest.approx(0.25)
    # Left has a knot inside the interval: 0 at 0, 1 at 1, stays 1 at 2. Right is 0 throughout.
    assert average_gain([(0, 0.0), (1, 1.0), (2, 0.3)], [(0, 0.0), (2, 0.0)]) == pytest.approx(0.75)
    assert average_gain([(1, 0.1), (2, 0.2)], [(3, 0.1), (4, 0.2)]) is None
    assert average_gain([], [(1, 0.5)]) is None
    # From a budget on; one below the common budgets leaves out nothing.
    both = [(1, 0.0), (3, 1.0)], [(2, 0.5), (4, 0.5)]
    assert average_gain(*both, at_least=2.5) == pytest.approx(0.375)
    assert average_gain(*both, at_least=1.5) == pytest.approx(0.25)
    assert average_gain(*both, at_least=3) is None


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
