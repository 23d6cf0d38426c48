"""One score from the W chains of a problem: by vote, by likelihood, by pass@W, or as their mean.

    single          the mean score of the chains
    vote            the answer that most chains give, in any notation (`Task.vote`); ties go
                    to the one seen first (`majority`)
    likeliest_mean  the answer of the chain with the highest mean log-probability a token
    likeliest_sum   the answer of the chain with the highest sum of log-probabilities
    pass            the best score among W chains: pass@W where a score is 0 or 1

Chains without an answer are not chosen. If n > W chains were drawn, pass@W is the mean over all
subsets of W chains, an unbiased estimate; with scores sorted in descending order,

    pass@W = sum_i s_i C(n - i, W - 1) / C(n, W)      i = 1 .. n: s_i is the best of its subset

and for scores of 0 and 1, c of them 1, that is the usual 1 - C(n - c, W) / C(n, W).
"""

import math
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
from jaxtyping import Float

from dms_jax.errors import DataError

Method = Literal["single", "vote", "likeliest_mean", "likeliest_sum", "pass"]
METHODS: tuple[Method, ...] = get_args(Method)


def likeliest(answers: Sequence[str | None], weights: Float[np.ndarray, " chains"]) -> int | None:
    """Index of the chain with the largest weight among those with an answer; None without any.

    Ties go to the first.

    # In: ["7", None, "8"], [-2, -1, -1.5]  Out: 2
    """
    known = [index for index, answer in enumerate(answers) if answer is not None]
    return max(known, key=lambda index: weights[index], default=None)


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
