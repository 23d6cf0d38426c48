"""DMC's merge, chunk by chunk, against the closed form of its weighted means."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dms_jax.policies import DMC
from dms_jax.policies.base import Chunk, Decisions, PolicyState, Projections
from tests.oracles import dmc

BATCH, KV_HEADS, HEAD_DIM, LENGTH = 2, 2, 4, 17


@functools.partial(jax.jit, static_argnums=0)
def transform(policy, rows, k, v, marks, importance, first, count):
    chunk = Chunk(
        k=k,
        v=v,
        decisions=Decisions(marks=marks, importance=importance),
        positions=first[:, None] + jnp.arange(k.shape[1], dtype=jnp.int32),
        count=count,
        page_table=jnp.zeros((BATCH, KV_HEADS, 1), jnp.int32),
        lengths=jnp.zeros((BATCH, KV_HEADS), jnp.int32),
        page_size=4,
    )
    state, chunk = policy.transform(PolicyState(rows=rows), chunk)
    return state.rows, chunk.k, chunk.v


@settings(max_examples=12)
@given(
    seed=st.integers(0, 2**20),
    rate=st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    width=st.sampled_from([1, 6]),
)
def test_means_do_not_depend_on_the_chunks(seed, rate, width):
    random = np.random.default_rng(seed)
    k, v = random.normal(size=(2, BATCH, LENGTH, KV_HEADS, HEAD_DIM))
    marks = random.random((BATCH, KV_HEADS, LENGTH)) < rate
    marks[..., 0] = False  # nothing comes before the first token
    omega = random.random((BATCH, KV_HEADS, LENGTH)) + 0.01
    got_k, got_v = np.zeros_like(k), np.zeros_like(v)
    with jax.enable_x64(True):
        policy = DMC()
        rows = policy.init_rows(BATCH, KV_HEADS, HEAD_DIM, jnp.float64)
        done = np.zeros(BATCH, np.int32)
        while (done < LENGTH).any():
            count = np.minimum(random.integers(0, width + 1, BATCH), LENGTH - done)
            index = np.minimum(done[:, None] + np.arange(width), LENGTH - 1)
            batch = np.arange(BATCH)[:, None]
            rows, new_k, new_v = transform(
                policy,
                rows,
                k[batch, index],
                v[batch, index],
                np.moveaxis(marks[batch, :, index], 1, 2),
                np.moveaxis(omega[batch, :, index], 1, 2),
                done,
                count.astype(np.int32),
            )
            for row in range(BATCH):
                part = slice(done[row], done[row] + count[row])
                got_k[row, part], got_v[row, part] = (
                    np.asarray(new)[row, : count[row]] for new in (new_k, new_v)
                )
            done = (done + count).astype(np.int32)
    for row, head in np.ndindex(BATCH, KV_HEADS):
        for got, x in ((got_k, k), (got_v, v)):
            want = dmc.pool(x[row, :, head], marks[row, head].astype(float), omega[row, head])
            np.testing.assert_allclose(got[row, :, head], want, atol=1e-12)


@pytest.mark.parametrize("neuron", ["first", "last"])
def test_decisions_and_importance_are_the_neurons(neuron):
    random = np.random.default_rng(3)
    q, k = random.normal(size=(1, 9, 6, 4)), random.normal(size=(1, 9, 2, 4))
    policy = DMC(neuron=neuron, offset=0.2, epsilon=0.01)
    index = {"first": 0, "last": -1}[neuron]
    with jax.enable_x64(True):
        decisions = policy.decide(
            Projections(
                q=jnp.asarray(q),
                k=jnp.asarray(k),
                v=jnp.asarray(k),
                adapter_logits=None,
                positions=jnp.arange(9, dtype=jnp.int32)[None],
                layer=jnp.asarray(0),
            )
        )
        cleared_q, cleared_k = policy.clear_borrowed(jnp.asarray(q), jnp.asarray(k))
    logits = dmc.merge_logits(k[0], neuron=index, offset=0.2)
    np.testing.assert_allclose(decisions.logits[0].T, logits, atol=1e-12)
    marks = logits > 0
    marks[0] = False
    np.testing.assert_array_equal(decisions.marks[0].T, marks)
    omega = dmc.importance_weights(q[0], 2, neuron=index, offset=0.2, epsilon=0.01)
    np.testing.assert_allclose(decisions.importance[0].T, omega, atol=1e-12)
    np.testing.assert_array_equal(cleared_q, dmc.without_neuron(q, index))
    np.testing.assert_array_equal(cleared_k, dmc.without_neuron(k, index))
