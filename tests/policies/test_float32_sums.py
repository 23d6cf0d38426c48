"""Sums, weights and decisions of half-precision models, in float32 against NumPy's float64.

The laws run in float64, where accumulation in the model's own dtype shows no error.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dms_jax.policies import DMC, DMS, H2O, ExpectedAttention, KeyDiff, Quest, SnapKV, Vanilla
from dms_jax.policies.quest import PageBounds
from dms_jax.policies.values import Chunk, Decisions, PolicyState, Rows, Tokens
from dms_jax.policies.victims import query_weights
from tests.oracles import dmc, scored
from tests.support.chunks import chunk_of, observed, read, state_of, tokens_of

HALF = jnp.bfloat16


def one_row(k, *, q=None, first=0, slots=None, **fields) -> Chunk:
    """Returns tokens of one sequence and one KV head, whose row has one page."""
    num_tokens = k.shape[1]
    tokens = tokens_of(k, q=q, positions=first + jnp.arange(num_tokens))
    options = dict(lengths=jnp.full((1, 1), first), page_size=slots or num_tokens)
    return chunk_of(tokens, **options | fields)


def halves(random, *shape, scale=1.0):
    """Returns random bfloat16 numbers, in bfloat16 and in float64."""
    array = jnp.asarray(scale * random.normal(size=shape), HALF)
    return array, np.asarray(array, np.float64)


def softmax(x):
    weights = np.exp(x - x.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


@pytest.mark.parametrize("width", [16, 1])
def test_400_merged_tokens_are_their_mean(width):
    """DMC, with one or 16 tokens at a time, stores the mean, rounded once."""
    random = np.random.default_rng(0)
    k = jnp.asarray(random.uniform(0.5, 1.5, (400 // width, 1, width, 1, 4)), HALF)
    omega = jnp.asarray(random.uniform(0.2, 1, (400 // width, 1, 1, width)), jnp.float32)
    policy = DMC(window=None)

    def step(rows, xs):
        index, k, omega = xs
        marks = index * width + jnp.arange(width) > 0
        chunk = one_row(k, decisions=Decisions(marks=marks[None, None], importance=omega))
        state, chunk = policy.merge(PolicyState(rows=rows), chunk)
        return state.rows, chunk.tokens.k

    rows = state_of(policy, 1, 1, 4, HALF).rows
    _, found = jax.lax.scan(step, rows, (jnp.arange(len(k)), k, omega))
    alpha = np.ones(400)
    alpha[0] = 0
    want = dmc.pool(
        np.asarray(k, np.float64).reshape(400, 4), alpha, np.asarray(omega).reshape(-1), None
    )
    chex.assert_trees_all_close(np.asarray(found, np.float64).reshape(400, 4), want, rtol=2**-8)


def test_h2o_adds_up_600_queries():
    policy = H2O(budget=8)
    state = state_of(policy, 1, 1, 2, HALF, num_pages=1, page_size=4)
    given = jnp.asarray([0.5, 0.3, 0.199, 0.001], HALF)
    chunk = one_row(jnp.zeros((1, 1, 1, 2), HALF), slots=4)
    placement = policy.write(state, chunk)[1]

    def step(state, _):
        return policy.observe(state, chunk, placement, observed(given[None, None, None])), None

    state, _ = jax.lax.scan(step, state, length=600)
    chex.assert_trees_all_close(state.pages.sums[0], 600 * np.asarray(given, np.float64), rtol=1e-4)


@jax.jit
def sums_of_a_prompt(policy, state, chunk, q, held):
    """Returns H2O's sums after a prompt in one pass, whose keys [B, K, S, D] are `held`."""
    state, placement = policy.write(state, chunk)
    state = policy.written(state, chunk, placement, None)
    rows = Rows(k=held, v=held, lengths=placement.lengths)
    return policy.observe(state, chunk, placement, observed(q=q, rows=rows)).pages.sums


@pytest.mark.parametrize("count", [230, 300])
def test_h2o_adds_up_a_dense_prompt_without_its_padding(count):
    """Compares with column sums of the causal weights of `count` queries, group-averaged."""
    random = np.random.default_rng(1)
    policy = H2O(budget=8, prefill="dense_then_evict")
    k, wide_k = halves(random, 1, 300, 1, 4)
    q, wide_q = halves(random, 1, 300, 2, 4)
    chunk = one_row(k, count=[count], scale=0.5)
    state = state_of(policy, 1, 1, 4, HALF, num_pages=1, page_size=300)
    held = jnp.where(jnp.arange(300)[:, None] < count, k[0, :, 0], 0)[None, None]
    found = sums_of_a_prompt(policy, state, chunk, q, held)
    logits = 0.5 * np.einsum("thd,sd->hts", wide_q[0, :count], wide_k[0, :count, 0])
    logits = np.where(np.tri(count, dtype=bool), logits, -np.inf)
    sums = np.asarray(found)[0]
    chex.assert_trees_all_close(sums[:count], softmax(logits).mean(0).sum(0), rtol=1e-4)
    assert not sums[count:].any()


@pytest.mark.parametrize("size", [1.0, 30.0])
def test_the_weights_of_a_query(size):
    """Also with large logits: at a scale of 30 they reach a thousand."""
    random = np.random.default_rng(2)
    q, wide_q = halves(random, 1, 2, 4, scale=size)
    k, wide_k = halves(random, 1, 1, 9, 4, scale=size)
    rows = Rows(k=k, v=k, lengths=jnp.asarray([[7]], jnp.int32))
    found = query_weights(q, rows, 0.5)
    want = softmax(0.5 * np.einsum("hd,sd->hs", wide_q[0], wide_k[0, 0, :7]))
    chex.assert_trees_all_close(found[0, 0, :, :7], want, rtol=1e-4, atol=1e-12)
    assert not np.asarray(found)[..., 7:].any()


def shown(q, k, **fields) -> Tokens:
    return tokens_of(k, q=q, positions=jnp.arange(1, q.shape[1] + 1), **fields)


@pytest.mark.parametrize("source", ["query_neuron", "adapter"])
def test_dms_decides_by_the_exact_logit(source):
    """100 raw - 5 for all numbers near 0.05, where bfloat16 has a resolution of 0.03."""
    near = jnp.asarray(0.05, HALF).view(jnp.uint16) + jnp.arange(-20, 20, dtype=jnp.uint16)
    raw = near.view(HALF)
    q = jnp.zeros((1, 40, 2, 4), HALF).at[0, :, 0, -1].set(raw)
    projections = shown(q, q[:, :, :1], adapter_logits=raw[None, None])
    decisions = DMS(source=source).decide(projections)
    logits = 100 * np.asarray(raw, np.float64) - 5
    chex.assert_trees_all_equal(decisions.marks[0, 0], logits > 0)
    chex.assert_trees_all_close(decisions.logits[0, 0], logits, rtol=1e-5, atol=1e-6)


def test_expected_attention_learns_moments():
    """Compares mean and covariance of all queries but the first `sinks`, token by token."""
    random = np.random.default_rng(4)
    policy = ExpectedAttention(budget=64, sinks=3)
    q, _ = halves(random, 500, 1, 1, 1, 4)
    q = (q + 2).astype(HALF)
    rows = state_of(policy, 1, 1, 4, HALF).rows

    def step(rows, xs):
        position, q = xs
        chunk = chunk_of(tokens_of(q, positions=position[None, None]))
        return policy.observe(PolicyState(rows=rows), chunk, None, observed(q=q)).rows, None

    rows, _ = jax.lax.scan(step, rows, (jnp.arange(500, dtype=jnp.int32), q))
    past = np.asarray(q, np.float64).reshape(500, 4)[3:]
    chex.assert_trees_all_close(rows.mean[0, 0, 0], past.mean(0), rtol=1e-4)
    chex.assert_trees_all_close(
        rows.spread[0, 0, 0] / len(past), np.cov(past.T, bias=True), rtol=1e-3, atol=1e-3
    )


@pytest.mark.parametrize("best", [0, 1])
def test_quest_bounds_are_compared_in_float32(best):
    """Sums of 256 and 256.5 over eight dims: both are 256 in bfloat16."""
    policy = Quest(budget=4, dense_layers=0)  # the current page, and one selected page
    high = np.full((4, 8), 32.0)
    high[best, 0] = 32.5
    high[2:] = -1
    bounds = PageBounds(low=jnp.asarray(high - 1, HALF), high=jnp.asarray(high, HALF))
    chunk = chunk_of(
        jnp.zeros((1, 1, 1, 8), HALF), page_table=[[range(4)]], lengths=[[7]], page_size=2
    )
    placement = Vanilla().write(PolicyState(), chunk)[1]
    given = PolicyState(pages=bounds), jnp.ones((1, 1, 8), HALF), chunk, placement
    pages, _ = read(policy, *given)
    chex.assert_trees_all_equal(pages, np.array([[[best, 3]]]))


def test_keydiff_distinguishes_similar_keys():
    """Directions that differ by a hundredth, with cosines near one."""
    random = np.random.default_rng(5)
    keys = jnp.asarray(1 + 0.02 * random.normal(size=(1, 1, 40, 8)), HALF)
    rows = Rows(k=keys, v=keys, lengths=jnp.asarray([[40]], jnp.int32))
    found = KeyDiff(budget=8).scores(None, None, rows)
    wide = np.asarray(keys, np.float64)[0, 0][:, None]
    want = scored.keydiff(wide)(39, [list(range(40))])[0]
    chex.assert_trees_all_close(found[0, 0], want, rtol=1e-7, atol=1e-6)


def test_snapkv_votes_with_exact_weights():
    random = np.random.default_rng(6)
    policy = SnapKV(budget=16, window=4, kernel=3)
    q, wide_q = halves(random, 1, 40, 2, 4)
    k, wide_k = halves(random, 1, 40, 1, 4)
    chunk = one_row(k, q=q, scale=0.5)
    state = state_of(policy, 1, 1, 4, HALF, group=2)
    state = policy.observe(state, chunk, None, observed(q=q))
    rows = Rows(
        k=jnp.swapaxes(k, 1, 2), v=jnp.swapaxes(k, 1, 2), lengths=jnp.asarray([[40]], jnp.int32)
    )
    found = policy.scores(state, chunk, rows)
    want = scored.snapkv(wide_q[0], wide_k[0], 4, 3)(39, [list(range(40))])[0]
    chex.assert_trees_all_close(found[0, 0], want, rtol=1e-4)
