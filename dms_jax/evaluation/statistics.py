"""Means and majority votes with standard errors.

Chains of one problem are not independent, so a problem is one observation (a cluster): a mean over
problems has the standard error of the problems' means,

    SE = s / sqrt(n)        s: standard deviation over the n problems, with n - 1

For a single problem it is unknown: NaN, which exceeds no threshold, and None in JSON.

Several seeds answer the same problems. The error of their mean comes from the choice of problems
and from the seeds. The sum of both variances is reported; it is slightly too large, as the first
contains part of the second:

    SE^2 = SE_problems(mean over seeds)^2 + s_seeds^2 / seeds

With one seed the second term is left out.

Two systems that answered the same problems are compared by paired differences, which removes the
variation in difficulty between problems.

The W chains of a problem have one score: `single` is the mean of the chains, `vote` that of the
answer that most chains give in any notation (`majority`), and `pass` the best among them (pass@W
where a score is 0 or 1). If n > W chains were drawn, pass@W is the mean over all subsets of W, an
unbiased estimate; with scores s_1 >= s_2 >= ...,

    pass@W = sum_i s_i C(n - i, W - 1) / C(n, W)      i = 1 .. n: s_i is the best of its subset
"""

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
from jaxtyping import Float

from dms_jax.errors import DataError

Method = Literal["single", "vote", "pass"]
METHODS: tuple[Method, ...] = get_args(Method)


@dataclasses.dataclass(frozen=True)
class Measured:
    """A value with its standard error; NaN if the error is unknown."""

    value: float | int
    error: float | int

    def beyond(self, threshold: float | int = 0, errors: float | int = 2) -> bool:
        """Whether the value exceeds a threshold by more than a number of standard errors."""
        return self.value - threshold > errors * self.error

    def to_list(self) -> list[float | None]:
        """[value, error] as JSON data; None for an unknown error."""
        return [float(self.value), None if math.isnan(self.error) else float(self.error)]

    def __str__(self) -> str:
        known = not math.isnan(self.error)
        return f"{self.value:.3f} ± {f'{self.error:.3f}' if known else 'unknown'}"


def standard_error(values: Float[np.ndarray, " observations"]) -> float:
    """Standard error of the mean of independent observations; NaN for a single one."""
    count = len(values)
    return float(values.std(ddof=1) / math.sqrt(count)) if count > 1 else math.nan


def mean_over_problems(values: Float[np.ndarray, "problems chains"]) -> Measured:
    """Mean over everything; its error is clustered by problem."""
    means = values.mean(1)
    return Measured(float(means.mean()), standard_error(means))


def mean_over_seeds(values: Float[np.ndarray, "seeds problems"]) -> Measured:
    """Mean over several seeds on the same problems."""
    return Measured(float(values.mean()), _error(values.mean(0), _seed_variance(values)))


def difference(
    left: Float[np.ndarray, "seeds problems"],
    right: Float[np.ndarray, "other_seeds other_problems"],
) -> Measured:
    """Mean paired difference `left` - `right` on the same problems.

    Raises:
      DataError: the numbers of problems differ.
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
    """Variance of the mean over seeds; 0 for a single seed."""
    return standard_error(values.mean(1)) ** 2 if len(values) > 1 else 0.0


def majority(answers: Sequence[str | None]) -> int | None:
    """Index of the first chain with the most frequent answer; None if no chain answered.

    Ties go to the answer seen first; chains without an answer do not vote.

    # In: ["7", None, "8", "8"]  Out: 2        ["7", "8"]  Out: 0
    """
    votes = collections.Counter(answer for answer in answers if answer is not None)
    return answers.index(votes.most_common(1)[0][0]) if votes else None


def vote_scores(
    answers: Sequence[Sequence[str | None]], scores: Float[np.ndarray, "problems chains"]
) -> Float[np.ndarray, " problems"]:
    """Score of each problem's majority vote; 0 if no chain answered.

    Args:
      answers: the answer of each chain of each problem; None if it gave none.
      scores: score of each of these answers.
    """
    winners = map(majority, answers)
    pairs = zip(scores, winners, strict=True)
    return np.asarray([0.0 if won is None else own[won] for own, won in pairs], np.float64)


def pass_at(
    scores: Float[np.ndarray, "problems chains"], count: int
) -> Float[np.ndarray, " problems"]:
    """Expected best score of `count` chains, estimated from all drawn chains.

    Raises:
      DataError: fewer chains were drawn.
    """
    drawn = scores.shape[1]
    if not 1 <= count <= drawn:
        raise DataError(f"pass@{count} cannot be estimated from {drawn} chains.")
    subsets = math.comb(drawn, count)
    # Exact integers: the binomial coefficients of many chains overflow float64.
    shares = [math.comb(drawn - rank, count - 1) / subsets for rank in range(1, drawn + 1)]
    return -np.sort(-scores, axis=1) @ np.asarray(shares)
