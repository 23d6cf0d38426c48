"""Means, votes, and how far they can be trusted.

Chains of one problem are not independent, so a problem is one observation (a cluster): a mean over
problems has the standard error of the problems' means,

    SE = s / sqrt(n)        s: standard deviation over the n problems, with n - 1

Of a single problem it is not known: NaN, which is beyond no threshold; None in JSON.

Several seeds answer the same problems. Their mean has an error from the choice of problems and one
from the seeds, and the sum of both, a little too large since one holds part of the other, is what
is reported:

    SE^2 = SE_problems(mean over seeds)^2 + s_seeds^2 / seeds

With one seed the second term is left out: the error is that of the problems alone.

Two systems that answered the same problems are compared problem by problem: the differences are the
observations, and what made a problem hard for both drops out.
"""

import collections
import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from dms_jax.errors import DataError


@dataclasses.dataclass(frozen=True)
class Measured:
    """A figure and its standard error; NaN where that is not known."""

    value: float | int
    error: float | int

    def beyond(self, threshold: float | int = 0, errors: float | int = 2) -> bool:
        """Whether the figure is above a threshold by more than some standard errors."""
        return self.value - threshold > errors * self.error

    def to_list(self) -> list[float | None]:
        """[value, error] as JSON data; None for an error that is not known."""
        return [float(self.value), None if math.isnan(self.error) else float(self.error)]

    def __str__(self) -> str:
        known = not math.isnan(self.error)
        return f"{self.value:.3f} ± {f'{self.error:.3f}' if known else 'unknown'}"


def standard_error(values: Float[np.ndarray, " observations"]) -> float:
    """Standard error of the mean of independent observations; NaN where there is but one."""
    count = len(values)
    return float(values.std(ddof=1) / math.sqrt(count)) if count > 1 else math.nan


def mean_over_problems(values: Float[np.ndarray, "problems chains"]) -> Measured:
    """Mean over everything; its error is clustered by problem."""
    means = values.mean(1)
    return Measured(float(means.mean()), standard_error(means))


def mean_over_seeds(values: Float[np.ndarray, "seeds problems"]) -> Measured:
    """Mean of seeds that answered the same problems."""
    return Measured(float(values.mean()), _error(values.mean(0), _seed_variance(values)))


def difference(
    left: Float[np.ndarray, "seeds problems"],
    right: Float[np.ndarray, "other_seeds other_problems"],
) -> Measured:
    """How much more `left` has than `right` on the same problems.

    Raises:
      DataError: they are not the same number of problems.
    """
    if left.shape[1] != right.shape[1]:
        raise DataError(
            f"only answers to the same problems can be paired; there are {left.shape[1]} and "
            f"{right.shape[1]}"
        )
    gaps = left.mean(0) - right.mean(0)
    seeds = _seed_variance(left) + _seed_variance(right)
    return Measured(float(gaps.mean()), _error(gaps, seeds))


def _error(observations: Float[np.ndarray, " problems"], seed_variance: float) -> float:
    return math.sqrt(standard_error(observations) ** 2 + seed_variance)


def _seed_variance(values: Float[np.ndarray, "seeds problems"]) -> float:
    """Variance of the mean over seeds, as far as there are several that differ."""
    return standard_error(values.mean(1)) ** 2 if len(values) > 1 else 0.0


def majority(answers: Sequence[str | None]) -> int | None:
    """The first chain that gave the most frequent answer; None where no chain answered.

    Of answers given equally often the one seen first wins; chains without an answer do not vote.

    # In: ["7", None, "8", "8"]  Out: 2        ["7", "8"]  Out: 0
    """
    votes = collections.Counter(answer for answer in answers if answer is not None)
    if not votes:
        return None
    most = max(votes.values())
    return next(
        i for i, answer in enumerate(answers) if answer is not None and votes[answer] == most
    )
