"""Compare systems at equal budget: Pareto frontiers, and interpolation between measured points.

The DMS paper (appendix F, tables 10 and 11) interpolates the frontier of each system linearly and
averages the gap over the budgets that both cover:

    gain = 1/|I| * integral over I of (A(x) - B(x)) dx      I: the largest common interval

`gain_at` compares one measured point with another system at the same budget, by interpolating the
other's two neighbouring points in the logarithm of the budget, problem by problem. It never
extrapolates.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from dms_jax.errors import DataError
from dms_jax.evaluation.statistics import Measured, difference

Number = float | int
Points = Sequence[tuple[Number, Number]]


def frontier(points: Points) -> list[tuple[Number, Number]]:
    """The Pareto-optimal points by budget: (budget, accuracy), both increasing.

    # In: (1, .2), (2, .5), (3, .4), (4, .6)  Out: (1, .2), (2, .5), (4, .6)
    """
    best: list[tuple[Number, Number]] = []
    for budget, accuracy in sorted(points, key=lambda point: (point[0], -point[1])):
        if not best or accuracy > best[-1][1]:
            best.append((budget, accuracy))
    return best


def average_gain(left: Points, right: Points) -> float | None:
    """Mean gap between two frontiers over the budgets that both cover; None if there are none.

    A frontier stays at its best accuracy up to the system's largest measured budget.
    """
    curves = []
    for points in (left, right):
        if not points:
            return None
        curve = frontier(points)
        largest = max(budget for budget, _ in points)
        if largest > curve[-1][0]:
            curve.append((largest, curve[-1][1]))
        curves.append(np.asarray(curve, np.float64))
    start = max(curve[0, 0] for curve in curves)
    end = min(curve[-1, 0] for curve in curves)
    if start >= end:
        return None
    knots = np.unique(np.concatenate([curve[:, 0] for curve in curves] + [[start, end]]))
    knots = knots[(knots >= start) & (knots <= end)]
    gaps = np.interp(knots, *curves[0].T) - np.interp(knots, *curves[1].T)
    area = np.sum((gaps[1:] + gaps[:-1]) / 2 * np.diff(knots))  # exact: linear between knots
    return float(area / (end - start))


@dataclasses.dataclass(frozen=True)
class Level:
    """Measurements of a system at one setting, with several seeds on the same problems.

    Attributes:
      budget: measured tokens per problem (peak or reads), averaged over seeds and problems.
      scores: mean score of each problem over its chains.
    """

    budget: Number
    scores: Float[np.ndarray, "seeds problems"]

    def __post_init__(self):
        if not self.budget > 0:
            raise DataError(f"a budget must be positive, got {self.budget!r}")


def at_budget(
    levels: Sequence[Level], budget: Number
) -> Float[np.ndarray, "seeds problems"] | None:
    """A system's scores at a budget, interpolated linearly in the logarithm of the budget.

    None outside the measured budgets.

    Raises:
      DataError: the neighbouring levels have different seeds or problems.
    """
    ordered = sorted(levels, key=lambda level: level.budget)
    for level in ordered:
        if math.isclose(level.budget, budget, rel_tol=1e-9):
            return level.scores
    for low, high in itertools.pairwise(ordered):
        if low.budget < budget < high.budget:
            if low.scores.shape != high.scores.shape:
                raise DataError(
                    f"levels of {low.scores.shape} and {high.scores.shape} (seeds, problems) "
                    "cannot be interpolated"
                )
            span = math.log(high.budget / low.budget)
            share = math.log(budget / low.budget) / span
            return (1 - share) * low.scores + share * high.scores
    return None


def gain_at(level: Level, baseline: Sequence[Level]) -> Measured | None:
    """Score difference of two systems at equal budget; None outside the measured budgets."""
    other = at_budget(baseline, level.budget)
    return None if other is None else difference(level.scores, other)
