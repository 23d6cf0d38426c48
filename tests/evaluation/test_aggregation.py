"""Votes, likelihoods and pass@k against enumerations that know none of the formulas."""

import itertools
import math

import chex
import numpy as np
import pytest

from dms_jax.errors import DataError
from dms_jax.evaluation import decided, likeliest, majority, pass_at


@pytest.mark.parametrize("count", [1, 2, 4, 6])
def test_pass_at_is_the_mean_over_all_subsets(count):
    rng = np.random.default_rng(0)
    scores = np.stack([rng.integers(0, 2, 6), rng.random(6), np.ones(6), np.zeros(6)]).astype(float)
    want = [
        np.mean([max(subset) for subset in itertools.combinations(own, count)]) for own in scores
    ]
    chex.assert_trees_all_close(pass_at(scores, count), np.array(want), rtol=1e-12)


def test_pass_at_of_right_and_wrong_is_the_usual_estimator():
    """1 - C(n - c, k) / C(n, k), also where the coefficients are far beyond float64."""
    right, drawn, count = 3, 2000, 700
    scores = np.zeros((1, drawn))
    scores[0, [5, 77, 1999]] = 1
    want = 1 - math.comb(drawn - right, count) / math.comb(drawn, count)
    assert pass_at(scores, count)[0] == pytest.approx(want, rel=1e-12)
    with pytest.raises(DataError, match="pass@4 cannot be estimated from 3 chains"):
        pass_at(np.zeros((1, 3)), 4)


@pytest.mark.parametrize(
    ("answers", "weights", "winner"),
    [
        (["7", None, "8"], [-2.0, -1.0, -1.5], 2),  # the likeliest has no answer
        (["7", "8"], [-1.0, -1.0], 0),  # a tie goes to the first
        ([None, None], [-1.0, -2.0], None),
    ],
)
def test_the_likeliest_answer(answers, weights, winner):
    assert likeliest(answers, np.array(weights)) == winner


def test_a_vote_is_decided_exactly_when_no_outcome_changes_it():
    """All states of four chains with three answers and none, and all their outcomes."""
    chains, answers = 4, ["a", "b", "c", None]
    seen = set()
    for state in itertools.product([*answers, "open"], repeat=chains):
        votes = {chain: each for chain, each in enumerate(state) if each != "open"}
        free = [chain for chain in range(chains) if chain not in votes]
        outcomes = set()
        # Besides the three answers that may have been given, the open chains may give new ones.
        for given in itertools.product([*answers, "new", "other"], repeat=len(free)):
            full = {**votes, **dict(zip(free, given, strict=True))}
            winner = majority([full[chain] for chain in range(chains)])
            outcomes.add(None if winner is None else full[winner])
        want = len(outcomes) == 1
        assert decided(votes, chains) == want, state
        seen.add((len(free), want))
    assert {(1, True), (1, False), (2, True), (2, False), (3, False)} <= seen
