"""Evaluation: tasks answered from the real cache, exact scores, budgets, comparisons."""

from dms_jax.evaluation.evaluating import SAMPLING, evaluate
from dms_jax.evaluation.pareto import Level, at_budget, average_gain, frontier, gain_at
from dms_jax.evaluation.result import Result, percent, summary_table
from dms_jax.evaluation.statistics import (
    Measured,
    difference,
    majority,
    mean_over_problems,
    mean_over_seeds,
    standard_error,
)

__all__ = [
    "SAMPLING",
    "Level",
    "Measured",
    "Result",
    "at_budget",
    "average_gain",
    "difference",
    "evaluate",
    "frontier",
    "gain_at",
    "majority",
    "mean_over_problems",
    "mean_over_seeds",
    "percent",
    "standard_error",
    "summary_table",
]
