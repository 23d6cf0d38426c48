"""Compare systems at equal budget: Pareto frontiers, and the mean gap between them.

The DMS paper (appendix F, tables 10 and 11) interpolates the frontier of each system linearly and
averages the gap over the budgets that both cover:

    gain = 1/|I| * integral over I of (A(x) - B(x)) dx      I: the largest common interval

It never extrapolates.
"""

from collections.abc import Sequence

import numpy as np

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


def average_gain(left: Points, right: Points, *, at_least: float = 0.0) -> float | None:
    """Mean gap between two frontiers over the budgets that both cover; None if there are none.

    Smaller budgets than `at_least` are left out. A frontier stays at its best accuracy up to the
    system's largest measured budget.
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
    start = max(at_least, *(curve[0, 0] for curve in curves))
    end = min(curve[-1, 0] for curve in curves)
    if start >= end:
        return None
    knots = np.unique(np.concatenate([curve[:, 0] for curve in curves] + [[start, end]]))
    knots = knots[(knots >= start) & (knots <= end)]
    gaps = np.interp(knots, *curves[0].T) - np.interp(knots, *curves[1].T)
    return float(np.trapezoid(gaps, knots) / (end - start))  # exact: linear between knots
