"""The oracles of the policies that need no training, against examples worked by hand."""

import chex
import numpy as np
import pytest

from tests.oracles import h2o, kcache, quest, streaming, tova, vanilla
from tests.oracles.examples import tensors
from tests.oracles.trace import softmax


def scored_keys(*weights):
    """One head of one dim: with q = 1 and scale 1, key j gets the softmax weight exp(k_j)."""
    k = np.log(np.array(weights, float))[:, None, None]
    q = np.ones_like(k)
    v = np.arange(len(weights), dtype=float)[:, None, None]
    return q, k, v


def test_vanilla_is_causal_attention():
    q, k, v = tensors(0)
    trace = vanilla.simulate(q, k, v)
    scores = np.einsum("thd,shd->hts", q, k.repeat(2, axis=1)) / np.sqrt(6)
    scores = np.where(np.tri(13, dtype=bool), scores, -np.inf)
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    chex.assert_trees_all_close(
        trace.outputs,
        np.einsum("hts,shd->thd", weights, v.repeat(2, axis=1)),
        rtol=1e-7,
        atol=1e-12,
    )
    chex.assert_trees_all_equal(trace.peak, np.array([13, 13]))
    chex.assert_trees_all_equal(trace.reads.sum(axis=0), np.array([91] * 4))


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


def test_h2o_cuts_prompt_by_group_mean_column_sums():
    q, k, v = tensors(12, length=24)
    scores = np.einsum("tkgd,skd->kgts", 3 * q.reshape(24, 2, 2, 6), k) / np.sqrt(6)
    weights = np.exp(scores) * np.tri(24)
    weights /= weights.sum(-1, keepdims=True)
    sums = weights.mean(axis=1).sum(axis=1)
    expected = [[*sorted(np.argsort(-row[:21])[:4].tolist()), 21, 22, 23] for row in sums]
    trace = h2o.simulate(3 * q, k, v, 24, heavy=4, recent=3, prefill="dense_then_evict")
    assert trace.kept[-1] == expected
    # The example tells a mean over the group from its first head and from a maximum.
    for other in (weights[:, 0].sum(axis=1), weights.max(axis=1).sum(axis=1)):
        assert (np.argsort(-other[:, :21])[:, :4] != np.argsort(-sums[:, :21])[:, :4]).any()


@pytest.mark.parametrize("prefill", ["evict_past_budget", "dense_then_evict"])
@pytest.mark.parametrize("length", [12, 13])
def test_a_sufficient_budget_equals_vanilla(prefill, length):
    q, k, v = tensors(10, length=length)
    dense = vanilla.simulate(q, k, v).outputs
    for trace in (
        tova.simulate(q, k, v, 5, budget=length, prefill=prefill),
        h2o.simulate(q, k, v, 5, heavy=4, recent=length - 4, prefill=prefill),
        streaming.simulate(q, k, v, 5, sinks=2, recent=length - 2, prefill=prefill),
        quest.simulate(q, k, v, 5, budget=16, page_size=4),
        kcache.simulate(q, k, v, 5, top=length),
    ):
        chex.assert_trees_all_close(trace.outputs, dense, rtol=1e-7, atol=1e-12)
        assert trace.kept[-1] == [list(range(length))] * 2


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
