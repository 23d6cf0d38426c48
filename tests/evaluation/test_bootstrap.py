"""Errors of average gains against full enumeration of all resamples, and against the formula."""

import itertools
import math

import numpy as np
import pytest

from dms_jax.errors import DataError
from dms_jax.evaluation import Trial, measured_average_gain
from tests.support.instances import further


def gain_of(left, right, at_least):
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

    start = max(ends(left)[0], ends(right)[0], at_least)
    end = min(ends(left)[1], ends(right)[1])
    if start >= end:
        return None
    cells = 20_000
    grid = start + (end - start) * (np.arange(cells) + 0.5) / cells
    return float((curve(left, grid) - curve(right, grid)).mean())


def drawn_systems(seeds, problems):
    """Three trials of each of two systems; budgets differ between problems."""
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


@pytest.mark.parametrize(
    ("seeds", "at_least"), [(2, 0.0), (2, 35.0), *further((1, 0.0), (3, 35.0))]
)
def test_error_equals_all_resamples(seeds, at_least):
    """All draws of 3 out of 4 problems with all seeds, and of one seed fewer with all problems."""
    problems = 4
    left, right = drawn_systems(seeds, problems)

    def gain(chosen, drawn):
        curves = (points_of(own, list(chosen), list(drawn)) for own in (left, right))
        return gain_of(*curves, at_least)

    every_seed, every_problem = range(seeds), range(problems)
    variance = np.var(
        [gain(every_seed, drawn) for drawn in itertools.product(every_problem, repeat=3)]
    )
    if seeds > 1:
        draws = itertools.product(every_seed, repeat=seeds - 1)
        variance += np.var([gain(chosen, every_problem) for chosen in draws])
    measured = measured_average_gain(left, right, at_least=at_least, resamples=4000)
    assert measured.value == pytest.approx(gain(every_seed, every_problem), abs=1e-5)
    # The error of a standard deviation from 4,000 draws is about 1.1% of it.
    assert measured.error == pytest.approx(math.sqrt(variance), rel=0.06)


def test_no_gain_or_unknown_error():
    fixed = np.ones((1, 3))
    low: list[Trial] = [Trial(fixed, fixed), Trial(2 * fixed, fixed)]
    high = [Trial(3 * fixed, fixed), Trial(4 * fixed, fixed)]
    assert measured_average_gain(low, high) is None
    assert measured_average_gain(low, []) is None
    assert measured_average_gain(low, low).to_list() == [0, 0]  # paired
    one = [Trial(each.budget[:, :1], each.scores[:, :1]) for each in low]
    assert math.isnan(measured_average_gain(one, one).error)
    with pytest.raises(DataError, match="the same problems"):
        measured_average_gain(low, one)
