"""The oracles of the policies, against examples worked by hand from the papers."""

import chex
import numpy as np

from tests.oracles import (
    dmc,
    dms,
    h2o,
    kcache,
    kvpop,
    kvzap,
    quest,
    scored,
    streaming,
    tova,
    vanilla,
)
from tests.oracles.trace import attend_live, default_scale, softmax


def tensors(seed, length=13, query_heads=4, kv_heads=2, dim=6):
    """Returns random q [T, H, D], k and v [T, K, D]."""
    random = np.random.default_rng(seed)
    shapes = [(length, query_heads, dim), (length, kv_heads, dim), (length, kv_heads, dim)]
    return [random.normal(size=shape) for shape in shapes]


def scored_keys(*weights):
    """One head of one dim: with q = 1 and scale 1, key j gets the softmax weight exp(k_j)."""
    k = np.log(np.array(weights, float))[:, None, None]
    q = np.ones_like(k)
    v = np.arange(len(weights), dtype=float)[:, None, None]
    return q, k, v


def test_dms_mask_example():
    # d = decisions, e_k = d_{k+1} marks key k; window 2, so three keys are always visible.
    decisions = [1, 0, 1, 1, 0, 0, 1, 0]
    mask = dms.visible(decisions, window=2, shift=1)
    assert [np.flatnonzero(row).tolist() for row in mask] == [
        [0],
        [0, 1],
        [0, 1, 2],
        [0, 1, 2, 3],
        [0, 2, 3, 4],
        [0, 3, 4, 5],
        [0, 3, 4, 5, 6],
        [0, 3, 4, 5, 6, 7],
    ]
    steps = dms.slots_per_step(decisions, window=2, shift=1)
    assert [len(slots) for slots in steps] == [1, 2, 3, 4, 4, 4, 5, 6]
    assert sum(len(slots) for slots in steps) == 29
    assert steps[4] == [0, 4, 2, 3]
    assert steps[5] == [0, 4, 5, 3]
    assert steps[7] == [0, 4, 5, 3, 6, 7]


def test_dms_six_cache_states():
    # Retention probabilities of A..F; a token is kept above one half, window 2, its own decision.
    keep = np.array([0.2, 0.9, 0.3, 0.8, 0.1, 0.95]) > 0.5
    steps = dms.slots_per_step((~keep).astype(int), window=2, shift=0)
    states = ["".join(sorted("ABCDEF"[token] for token in slots)) for slots in steps]
    assert states == ["A", "AB", "ABC", "BCD", "BCDE", "BDEF"]


def test_dmc_merges_by_weight():
    # One head of dims (payload, 0, 0, neuron). Decisions: open, merge, open, merge, merge.
    merge_logit = [9.0, 6.0, 4.0, 6.0, 6.0]  # The first is forced to open, 5 is the threshold.
    importance_logit = np.array([0.0, 1.0, -1.0, -5.0, 2.0])
    k = np.array(
        [
            [[payload, 0, 0, neuron]]
            for payload, neuron in zip([1, 2, 3, 4, 5], merge_logit, strict=True)
        ]
    )
    q = np.array([[[1.0, 0, 0, neuron]] for neuron in importance_logit])
    v = np.array([[[10.0 * payload, 0, 0, 7.0]] for payload in [1, 2, 3, 4, 5]])
    cos, sin = np.ones((5, 2)), np.zeros((5, 2))
    trace = dmc.simulate(q, k, v, cos=cos, sin=sin, epsilon=0.01)
    assert [step[0] for step in trace.live] == [[0], [1], [1, 2], [1, 3], [1, 4]]
    omega = 1 / (1 + np.exp(-(importance_logit + 5))) + 0.01
    first = (omega[0] * 1 + omega[1] * 2) / (omega[0] + omega[1])
    second = (omega[2:] @ [3, 4, 5]) / omega[2:].sum()
    weights = softmax(np.array([first, second]) / 2)
    chex.assert_trees_all_close(
        trace.outputs[4, 0, 0], weights @ [10 * first, 10 * second], rtol=1e-7
    )
    chex.assert_trees_all_close(trace.outputs[4, 0, 3], 7.0, rtol=1e-7)
    chex.assert_trees_all_equal(trace.peak, np.array([2]))


def test_tova_drops_the_lightest_even_the_newest():
    trace = tova.simulate(*scored_keys(3, 1, 2, 0.5, 4), budget=3, scale=1.0)
    assert [step[0] for step in trace.live] == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 4]]
    assert [step[0] for step in trace.kept] == [[0], [0, 1], [0, 1, 2], [0, 1, 2], [0, 2, 4]]
    chex.assert_trees_all_equal(trace.peak, np.array([4]))
    chex.assert_trees_all_close(trace.outputs[4], (1 * 1 + 2 * 2 + 4 * 4) / 10, rtol=1e-7)


def test_tova_cuts_a_dense_prompt_once():
    trace = tova.simulate(
        *scored_keys(3, 1, 2, 0.5, 4, 5), 4, budget=2, prefill="dense_then_evict", scale=1.0
    )
    assert [step[0] for step in trace.kept] == [[0], [0, 1], [0, 1, 2], [0, 2], [0, 4], [4, 5]]
    chex.assert_trees_all_equal(trace.live_counts[:, 0], np.array([1, 2, 3, 4, 3, 3]))


def test_tova_weighs_by_the_mean_over_all_query_heads():
    # Two query heads on one KV head: rows (.7, .2, .1) and (.1, .3, .6): means .4, .25, .35.
    rows = np.log([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6]])
    k = rows.T[:, None, :]
    q = np.repeat(np.eye(2)[None], 3, axis=0)
    trace = tova.simulate(q, k, np.zeros_like(k), budget=2, scale=1.0)
    assert trace.kept[2] == [[0, 2]]


def test_h2o_keeps_sums_and_recent():
    # Weights 4, 1, 2, 2, 1, 8 with one heavy and one recent token. Rows and running sums:
    # t=0: 0:1.          t=1: 0:1+4/5, 1:1/5.       t=2: over 0,1,2 of 7: 0:+4/7, 1:+1/7, 2:2/7;
    # three held, the last stays, of 0 and 1 the heavier is 0. From then on 0 keeps its lead.
    trace = h2o.simulate(*scored_keys(4, 1, 2, 2, 1, 8), heavy=1, recent=1, scale=1.0)
    assert [step[0] for step in trace.kept] == [[0], [0, 1], [0, 2], [0, 3], [0, 4], [0, 5]]
    assert [step[0] for step in trace.live][5] == [0, 4, 5]
    chex.assert_trees_all_equal(trace.peak, np.array([3]))


def test_h2o_sums_a_dense_prompt_before_the_cut():
    trace = h2o.simulate(
        *scored_keys(1, 5, 1, 1, 1, 1), 4, heavy=1, recent=1, prefill="dense_then_evict", scale=1.0
    )
    # Column sums over the four rows: 0: 1 + 1/6 + 1/7 + 1/8, 1: 5/6 + 5/7 + 5/8, so 1 is heavy.
    assert [step[0] for step in trace.kept][3:] == [[1, 3], [1, 4], [1, 5]]
    chex.assert_trees_all_equal(trace.live_counts[:, 0], np.array([1, 2, 3, 4, 3, 3]))


def test_streaming_keeps_sinks_and_recent():
    q, k, v = tensors(11, length=7)
    trace = streaming.simulate(q, k, v, sinks=1, recent=3)
    assert [step[0] for step in trace.live] == [
        [0],
        [0, 1],
        [0, 1, 2],
        [0, 1, 2, 3],
        [0, 2, 3, 4],
        [0, 3, 4, 5],
        [0, 4, 5, 6],
    ]
    weights = softmax(k[[0, 4, 5, 6], 1] @ q[6, 2] / np.sqrt(6))
    chex.assert_trees_all_close(trace.outputs[6, 2], weights @ v[[0, 4, 5, 6], 1], rtol=1e-7)


def test_streaming_cuts_a_dense_prompt_once():
    q, k, v = tensors(11, length=7)
    trace = streaming.simulate(q, k, v, 5, sinks=1, recent=3, prefill="dense_then_evict")
    live = [step[0] for step in trace.live]
    assert live == [
        [0],
        [0, 1],
        [0, 1, 2],
        [0, 1, 2, 3],
        [0, 1, 2, 3, 4],
        [0, 3, 4, 5],
        [0, 4, 5, 6],
    ]
    assert trace.kept[4] == [[0, 2, 3, 4]] * 2
    chex.assert_trees_all_close(trace.outputs[4], vanilla.simulate(q, k, v).outputs[4], rtol=1e-7)


def test_quest_bounds_of_whole_and_partial_pages():
    # Pages {0, 1}, {2, 3}, {4}. Query (1, -1): maxima minus minima of each page.
    keys = np.array([[1.0, 5.0], [2.0, -1.0], [0.0, 0.0], [1.0, 1.0], [-3.0, -4.0]])
    bounds = quest.page_bounds(np.array([1.0, -1.0]), keys, 2)
    chex.assert_trees_all_equal(bounds, np.array([3.0, 1.0, 1.0]))


def test_quest_pages():
    bounds = np.array([3.0, 9.0, 1.0, 7.0, -2.0])
    assert quest.selected_pages(bounds, 3, force_last_page=True) == [1, 3, 4]
    assert quest.selected_pages(bounds, 3, force_last_page=False) == [0, 1, 3]
    current_is_best = np.array([3.0, 9.0, 1.0, 7.0, 10.0])
    assert quest.selected_pages(current_is_best, 3, force_last_page=True) == [1, 3, 4]
    assert quest.selected_pages(bounds, 1, force_last_page=True) == [4]
    assert quest.selected_pages(bounds, 5, force_last_page=True) == [0, 1, 2, 3, 4]


def test_quest_heads_read_separate_pages_after_prompt():
    k = np.array([0.0, 9, 0, 0, -9, 0, 1, 1, 2.0])[:, None, None]
    q = np.repeat(np.array([[[1.0], [-1.0]]]), 9, axis=0)
    v = np.arange(9.0)[:, None, None]
    trace = quest.simulate(q, k, v, 7, budget=4, page_size=2, scale=1.0)
    assert trace.attended[6] == [list(range(7))] * 2
    assert trace.attended[7] == [[0, 1, 6, 7], [4, 5, 6, 7]]
    assert trace.attended[8] == [[0, 1, 8], [4, 5, 8]]
    chex.assert_trees_all_equal(trace.live_counts[:, 0], np.arange(1, 10))
    free = quest.simulate(q, k, v, 7, budget=4, page_size=2, force_last_page=False, scale=1.0)
    # Three pages at least. The second head's bounds 0, 0, 9, -1, -2 leave its own page out.
    assert free.attended[8] == [[0, 1, 6, 7, 8], [0, 1, 2, 3, 4, 5]]
    skipped = quest.simulate(q, k, v, 7, budget=4, page_size=2, layer=1, scale=1.0)
    chex.assert_trees_all_equal(skipped.reads[8], np.array([9, 9]))


def test_kcache_does_not_renormalise_weights():
    q, k, v = scored_keys(1, 4, 2, 3)
    trace = kcache.simulate(q, k, v, 2, top=2, scale=1.0)
    assert trace.attended[1:] == [[[0, 1]], [[1, 2]], [[1, 3]]]
    chex.assert_trees_all_close(trace.outputs[3], (4 * 1 + 3 * 3) / 10, rtol=1e-7)
    on_device = kcache.simulate(q, k, v, 2, top=2, layer=0, device_layers=1, scale=1.0)
    chex.assert_trees_all_close(
        on_device.outputs, vanilla.simulate(q, k, v, scale=1.0).outputs, rtol=1e-7
    )


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
