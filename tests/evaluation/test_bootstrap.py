"""Errors of average gains against full enumeration of all resamples, and against the formula."""

import itertools
import math

import numpy as np
import pytest

from dms_jax.errors import DataError
from dms_jax.evaluation import Trial, difference, measured_average_gain
from tests.support.instances import further


def gain_of(left, right):
    """The mean gap on a fine grid: the best score at each budget, linear between the best."""

    def curve(points, grid):
        best = []
        for budget, score in sorted(points):
            if not best or score > best[-1][1]:
                best.append((budget, score))
        end = max(budget for budget, _ in points)
        return np.interp(grid, *zip(*best, (end, best[-1][1]), strict=True))

    def ends(points):
        return min(b for b, _ in points), max(b for b, _ in points)

    start, end = max(ends(left)[0], ends(right)[0]), min(ends(left)[1], ends(right)[1])
    if start >= end:
        return None
    cells = 20_000
    grid = start + (end - start) * (np.arange(cells) + 0.5) / cells
    return float((curve(left, grid) - curve(right, grid)).mean())


def drawn_systems(seeds, problems):
    """Three trials of each of two systems; budgets differ from problem to problem."""
    rng = np.random.default_rng(3)
    hardness = rng.random(problems)

    def trial(budget, level):
        shape = (seeds, problems)
        scores = np.clip(level - 0.5 * hardness + 0.2 * rng.random(shape), 0, 1)
        return Trial(budget * (1 + hardness) * (0.9 + 0.2 * rng.random(shape)), scores)

    left = [trial(10, 0.6), trial(20, 0.9), trial(40, 0.85)]
    return left, [trial(15, 0.5), trial(30, 0.7), trial(60, 0.9)]


def points_of(trials, seeds, problems):
    """Mean budget and score over the drawn seeds and problems."""
    return [
        (
            float(trial.budget[np.ix_(seeds, problems)].mean()),
            float(trial.scores[np.ix_(seeds, problems)].mean()),
        )
        for trial in trials
    ]


@pytest.mark.parametrize("seeds", [2, *further(1, 3)])
def test_the_error_is_that_of_all_resamples(seeds):
    """All draws of 3 out of 4 problems with all seeds, and of one seed fewer with all problems."""
    problems = 4
    left, right = drawn_systems(seeds, problems)

    def gain(chosen, drawn):
        return gain_of(*(points_of(own, list(chosen), list(drawn)) for own in (left, right)))

    every_seed, every_problem = range(seeds), range(problems)
    variance = np.var(
        [gain(every_seed, drawn) for drawn in itertools.product(every_problem, repeat=3)]
    )
    if seeds > 1:
        draws = itertools.product(every_seed, repeat=seeds - 1)
        variance += np.var([gain(chosen, every_problem) for chosen in draws])
    measured = measured_average_gain(left, right, resamples=4000)
    assert measured.value == pytest.approx(gain(every_seed, every_problem), abs=1e-5)
    # The error of a standard deviation from 4,000 draws is about 1.1% of it.
    assert measured.error == pytest.approx(math.sqrt(variance), rel=0.06)


@pytest.mark.nightly
def test_where_frontiers_stay_the_error_is_that_of_a_mean():
    """Fixed budgets and one gap for all points of a problem: gain and error are those of gaps."""
    rng = np.random.default_rng(0)
    gaps, base = 0.1 * rng.random((2, 50)), 0.3 * rng.random((1, 50))
    fixed = np.ones((2, 50))
    right = [Trial(10 * fixed, base + 0 * gaps), Trial(20 * fixed, base + 0.5 + 0 * gaps)]
    left = [Trial(10 * fixed, base + gaps), Trial(20 * fixed, base + 0.5 + gaps)]
    measured, want = measured_average_gain(left, right, resamples=4000), difference(gaps, 0 * gaps)
    assert measured.value == pytest.approx(want.value)
    # The error of a standard deviation from 4,000 draws is about 1.1% of it.
    assert measured.error == pytest.approx(want.error, rel=0.06)
    same = measured_average_gain(right, right)
    assert (same.value, same.error) == (0, 0)  # paired


def test_what_has_no_gain_or_no_known_error():
    fixed = np.ones((1, 3))
    low: list[Trial] = [Trial(fixed, fixed), Trial(2 * fixed, fixed)]
    high = [Trial(3 * fixed, fixed), Trial(4 * fixed, fixed)]
    assert measured_average_gain(low, high) is None
    assert measured_average_gain(low, []) is None
    one = [Trial(each.budget[:, :1], each.scores[:, :1]) for each in low]
    assert math.isnan(measured_average_gain(one, one).error)
    with pytest.raises(DataError, match="the same problems"):
        measured_average_gain(low, one)
