"""The error of an average gain, by repeating the computation on resampled problems and seeds.

A resample draws problems with replacement, the same ones for both systems (a paired bootstrap).
Mean scores and mean budgets change, and with them the frontiers and their common interval. The
error from the choice of problems is the standard deviation of the gain over the resamples. Seeds
are resampled in the same way, over all problems, and both variances are added as in `statistics`:

    SE^2 = SE_problems(mean over seeds)^2 + SE_seeds(mean over problems)^2

A resample has n - 1 of n problems, and one seed less than there are: the variance of a mean over n
- 1 draws out of n is s^2 / n with s^2 over n - 1, the unbiased estimate (with n draws it would be
too small, by half for two seeds). With one seed the second term is left out.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from dms_jax.errors import DataError
from dms_jax.evaluation.pareto import average_gain
from dms_jax.evaluation.statistics import Measured

RESAMPLES = 1000


@dataclasses.dataclass(frozen=True)
class Trial:
    """Measurements of a system at one setting, with several seeds on the same problems.

    Attributes:
      budget: tokens of each problem (peak or reads).
      scores: score of each problem.
    """

    budget: Float[np.ndarray, "seeds problems"]
    scores: Float[np.ndarray, "seeds problems"]


def measured_average_gain(
    left: Sequence[Trial],
    right: Sequence[Trial],
    *,
    at_least: float = 0.0,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Measured | None:
    """Mean gap between two frontiers with its standard error; None if they share no budgets.

    Smaller budgets than `at_least` are left out.
    Resamples that share no budgets are left out; the error is unknown (NaN) for a single problem,
    or if more than half of the resamples are left out.

    Raises:
      DataError: the trials have different seeds or problems.
    """
    shapes = {trial.scores.shape for trial in (*left, *right)}
    if len(shapes) > 1:
        raise DataError(f"only answers to the same problems can be paired; there are {shapes}.")
    if not left or not right:
        return None
    seeds, problems = shapes.pop()
    gains = functools.partial(_gains, left, right, at_least)
    (value,) = gains(np.full((1, seeds, problems), 1 / (seeds * problems)))
    if value is None:
        return None
    if problems == 1:
        return Measured(value, math.nan)
    rng = np.random.default_rng(seed)
    shape = (resamples, seeds, problems)
    by_problems = _shares(problems, resamples, rng)[:, None, :] / seeds
    error = _spread(gains(np.broadcast_to(by_problems, shape)))
    if seeds > 1:
        by_seeds = _shares(seeds, resamples, rng)[:, :, None] / problems
        error = math.hypot(error, _spread(gains(np.broadcast_to(by_seeds, shape))))
    return Measured(value, error)


def _spread(gains: Sequence[float | None]) -> float:
    """Standard deviation of the gain over draws."""
    known = [gain for gain in gains if gain is not None]
    return float(np.std(known, ddof=1)) if len(known) > len(gains) / 2 else math.nan


def _gains(
    left: Sequence[Trial],
    right: Sequence[Trial],
    at_least: float,
    weights: Float[np.ndarray, "draws seeds problems"],
) -> list[float | None]:
    """The average gain under each weighting of the seeds and problems."""
    systems = [
        (_means(weights, [trial.budget for trial in own]), _means(weights, [t.scores for t in own]))
        for own in (left, right)
    ]
    return [
        average_gain(
            *(list(zip(x[draw], y[draw], strict=True)) for x, y in systems), at_least=at_least
        )
        for draw in range(len(weights))
    ]


def _means(
    weights: Float[np.ndarray, "draws seeds problems"], values: Sequence[np.ndarray]
) -> list[list[float]]:
    """Returns the mean of each trial's values under each weighting, [draws][trials]."""
    stacked = np.stack([each.astype(np.float64) for each in values])
    return np.einsum("dsp,tsp->dt", weights, stacked, optimize=True).tolist()


def _shares(count: int, draws: int, rng: np.random.Generator) -> Float[np.ndarray, "draws count"]:
    """The share of draws that picked each of `count` items."""
    return rng.multinomial(count - 1, np.full(count, 1 / count), size=draws) / (count - 1)
