"""Evaluation: tasks answered from the real cache, scores, budgets and comparisons."""

from dms_jax.evaluation.bootstrap import Trial, measured_average_gain
from dms_jax.evaluation.evaluating import SAMPLING, evaluate
from dms_jax.evaluation.hyperscaling import System, hyperscale
from dms_jax.evaluation.hyperscaling_result import AXES, Axis, Hyperscaling, Point
from dms_jax.evaluation.likelihood import Likelihood, encode_pair, likelihoods
from dms_jax.evaluation.pareto import average_gain, frontier
from dms_jax.evaluation.perplexity import Perplexity, perplexity
from dms_jax.evaluation.prompting import Chat
from dms_jax.evaluation.result import (
    Result,
    percent,
    summary_rows,
    summary_table,
    terminal_table,
)
from dms_jax.evaluation.serving import Serving
from dms_jax.evaluation.statistics import (
    METHODS,
    Measured,
    Method,
    difference,
    majority,
    mean_over_problems,
    mean_over_seeds,
    pass_at,
    standard_error,
)

__all__ = [
    "AXES",
    "METHODS",
    "SAMPLING",
    "Axis",
    "Chat",
    "Hyperscaling",
    "Likelihood",
    "Measured",
    "Method",
    "Perplexity",
    "Point",
    "Result",
    "Serving",
    "System",
    "Trial",
    "average_gain",
    "difference",
    "encode_pair",
    "evaluate",
    "frontier",
    "hyperscale",
    "likelihoods",
    "majority",
    "mean_over_problems",
    "mean_over_seeds",
    "measured_average_gain",
    "pass_at",
    "percent",
    "perplexity",
    "standard_error",
    "summary_rows",
    "summary_table",
    "terminal_table",
]
