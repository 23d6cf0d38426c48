"""The oracle of policies that score tokens, against examples by hand."""

import chex
import numpy as np
import pytest

from tests.oracles import scored, vanilla
from tests.oracles.examples import tensors


def lengths_of(trace, head=0):
    return [len(step[head]) for step in trace.live], [len(step[head]) for step in trace.kept]


def test_prompt_and_answer_cuts():
    q, k, v = tensors(0, length=12)
    trace = scored.simulate(q, k, v, 6, worth=scored.knorm(k), budget=3, interval=2)
    live, kept = lengths_of(trace)
    assert live == [1, 2, 3, 4, 5, 6, 4, 5, 4, 5, 4, 5]
    assert kept == [1, 2, 3, 4, 5, 3, 4, 3, 4, 3, 4, 3]
    chex.assert_trees_all_close(trace.outputs[:6], vanilla.simulate(q, k, v).outputs[:6], rtol=1e-7)
    once = scored.simulate(q, k, v, 6, worth=scored.knorm(k), budget=3, interval=None)
    assert lengths_of(once)[1][5:] == [3, 4, 5, 6, 7, 8, 9]
    never = scored.simulate(q, k, v, 0, worth=scored.knorm(k), budget=3, interval=None)
    assert lengths_of(never)[1] == list(range(1, 13))


def test_snapkv_scores_after_an_earlier_cut():
    """Checks scores after an earlier cut, where slots no longer equal positions."""
    q, k, _ = tensors(4, length=9)
    ids = [[0, 3, 7, 8], [1, 2, 7, 8]]
    scores = scored.snapkv(q, k, window=2, kernel=1)(8, ids)
    logits = np.array(
        [[k[j, 1] @ q[i, h] / np.sqrt(6) for j in ids[1]] for i in (7, 8) for h in (2, 3)]
    )
    logits[:2, 3] = -np.inf  # query 7 does not see key 8
    weights = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    chex.assert_trees_all_close(scores[1][:2], weights[:, :2].mean(0), rtol=1e-7)


@pytest.mark.parametrize(("budget", "protected", "beta"), [(64, 8, 20), (100, 0, 7), (33, 32, 20)])
def test_pyramid_spends_exactly_its_budget(budget, protected, beta):
    layers = [scored.pyramid(budget, protected, beta, layer, 12) for layer in range(12)]
    assert layers == sorted(layers, reverse=True)
    assert budget - 1 < np.mean(layers) + 1 <= budget + 1
    assert layers[-1] == max(1, protected + (budget - protected) // beta)
    assert scored.pyramid(budget, protected, beta, 0, 1) == budget
