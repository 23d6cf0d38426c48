"""The oracles of KVzap and KVpop, against examples worked by hand."""

import chex
import numpy as np

from tests.oracles import kvpop, kvzap, vanilla
from tests.oracles.examples import tensors
from tests.oracles.trace import attend_live, default_scale


def test_kvzap_drops_low_scores():
    scores = np.array([1.0, -1, 3, -1, 5, 6])
    # Window 1: token 3 pushes out token 1, and token 5 token 3.
    assert kvzap.slots_per_step(scores, 0.0, 1) == [
        [0],
        [0, 1],
        [0, 1, 2],
        [0, 3, 2],
        [0, 3, 2, 4],
        [0, 5, 2, 4],
    ]
    assert kvzap.slots_per_step(scores, -1.0, 1)[-1] == list(range(6))  # at the threshold it stays
    # The first two tokens are always kept.
    assert kvzap.slots_per_step(scores, 0.0, 1, sinks=2)[-1] == [0, 1, 2, 5, 4]
    assert kvzap.slots_per_step(scores, 0.0, 1, sinks=1)[-1] == [0, 5, 2, 4]


def test_kvpop_drops_the_lowest_score_beyond_the_window():
    q, k, v = (x[:, :1] for x in tensors(1, length=6))
    own = np.array([5.0, 1, 3, 9, 9, 9])[:, None]
    late = np.array([0.0, 0, 0, 4, 0, 0])[:, None]
    # Window 2, budget 3. After token 3 tokens 0 (5 + 0) and 1 (1 + 4) have scores: the older one
    # of equals goes. After token 4 also token 2 (3 + 0), which goes.
    trace = kvpop.simulate(q, k, v, own=own, late=late, budget=3, window=2)
    assert [step[0] for step in trace.live] == [
        [0],
        [0, 1],
        [0, 1, 2],
        [0, 1, 2, 3],
        [4, 1, 2, 3],
        [4, 1, 5, 3],
    ]
    assert [sorted(step[0]) for step in trace.kept[3:]] == [[1, 2, 3], [1, 3, 4], [3, 4, 5]]
    scale = default_scale(q, None)
    want = attend_live(q[5], k, v, [[4, 1, 5, 3]], scale)
    chex.assert_trees_all_close(trace.outputs[5], want, rtol=1e-12)


def test_kvpop_cuts_a_dense_prompt_once():
    q, k, v = (x[:, :1] for x in tensors(2, length=7))
    own, late = np.array([3.0, 1, 4, 2, 0, 0, 0])[:, None], np.zeros((7, 1))
    options = dict(own=own, late=late, budget=3, window=1, prefill="dense_then_evict")
    trace = kvpop.simulate(q, k, v, 5, **options)
    assert trace.live[4] == [[0, 1, 2, 3, 4]]
    assert trace.kept[4] == [[0, 2, 4]]
    assert trace.live[5] == [[0, 2, 4, 5]]
    assert trace.live[6] == [[0, 2, 6, 5]]
    dense = vanilla.simulate(q, k, v).outputs
    chex.assert_trees_all_close(trace.outputs[:5], dense[:5], rtol=1e-12)
