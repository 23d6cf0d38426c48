"""Merging, as a scan and token by token, hard and soft, against NumPy's closed forms."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dms_jax.policies import DMC
from dms_jax.policies.merging import partial_means
from tests.oracles import dmc
from tests.support.chunks import chunk_of, tokens_of
from tests.support.instances import further

BATCH, KV_HEADS, HEAD_DIM, LENGTH = 2, 2, 4, 17
every_window = pytest.mark.parametrize("window", [3, 12, *further(None, 1, 2, 16, 40)])


def draw(seed: int, dtype=np.float64):
    """Draws k, v [B, T, K, D] and alpha, omega [B, K, T]; alpha is in [0, 1], with both ends."""
    random = np.random.default_rng(seed)
    k, v = random.normal(size=(2, BATCH, LENGTH, KV_HEADS, HEAD_DIM))
    alpha = np.clip(random.normal(0.6, 0.5, (BATCH, KV_HEADS, LENGTH)), 0, 1)
    alpha[..., 0] = 0
    omega = random.random((BATCH, KV_HEADS, LENGTH)) + 0.01
    return [x.astype(dtype) for x in (k, v, alpha, omega)]


def pooled(x, alpha, omega, window):
    """Returns NumPy's closed form for every sequence and head, [B, T, K, D]."""
    rows = [
        [dmc.pool(x[b, :, h], alpha[b, h], omega[b, h], window) for h in range(KV_HEADS)]
        for b in range(BATCH)
    ]
    return np.moveaxis(np.array(rows), 1, 2)


# Without jit every small operation of a scan is a separate program.
means_of = jax.jit(partial_means, static_argnums=4)


@every_window
def test_partial_means_equal_the_closed_form_in_float64(window):
    k, v, alpha, omega = draw(1)
    with jax.enable_x64(True):
        got_k, got_v = means_of(*map(jnp.asarray, (k, v, alpha, omega)), window)
    chex.assert_trees_all_close(got_k, pooled(k, alpha, omega, window), rtol=1e-7, atol=1e-13)
    chex.assert_trees_all_close(got_v, pooled(v, alpha, omega, window), rtol=1e-7, atol=1e-13)


class HalfPrecisionTest(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    def test_sums_are_taken_in_float32(self):
        k, v, alpha, omega = draw(3, np.float32)
        half = [jnp.asarray(x, jnp.bfloat16) for x in (k, v)]
        means = self.variant(functools.partial(partial_means, window=12))
        got, _ = means(*half, jnp.asarray(alpha), jnp.asarray(omega))
        want = pooled(np.asarray(half[0], np.float64), alpha, omega, 12)
        chex.assert_type(got, jnp.bfloat16)
        chex.assert_trees_all_equal(got, jnp.asarray(want, jnp.float32).astype(jnp.bfloat16))


@pytest.mark.parametrize("window", [3, *further(None)])
def test_gradients_equal_finite_differences(window):
    arguments = draw(4)
    arguments[2] = 0.1 + 0.8 * arguments[2]  # within (0, 1), so that both differences exist
    random = np.random.default_rng(5)
    weights = random.normal(size=(2, *arguments[0].shape))

    def value(k, v, alpha, omega):
        means = pooled(k, alpha, omega, window), pooled(v, alpha, omega, window)
        return sum((weight * mean).sum() for weight, mean in zip(weights, means, strict=True))

    def loss(*arguments):
        means = partial_means(*arguments, window)
        return sum((weight * mean).sum() for weight, mean in zip(weights, means, strict=True))

    with jax.enable_x64(True):
        gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(*map(jnp.asarray, arguments))
    for index, gradient in enumerate(gradients):
        for _ in range(3):
            direction = random.normal(size=gradient.shape)
            ends = []
            for step in (1e-6, -1e-6):
                moved = list(arguments)
                moved[index] = moved[index] + step * direction
                ends.append(value(*moved))
            slope = (ends[0] - ends[1]) / 2e-6
            found = (np.asarray(gradient) * direction).sum()
            chex.assert_trees_all_close(found, slope, rtol=1e-6, atol=1e-8)


def shown(q, k, positions=None):
    if positions is None:
        positions = np.arange(k.shape[1])[None]
    return tokens_of(k, q=q, positions=positions)


@pytest.mark.parametrize("per", ["head", "layer"])
@pytest.mark.parametrize("neuron", ["first", "last"])
def test_neurons_give_decisions_and_importance(neuron, per):
    random = np.random.default_rng(3)
    q, k = random.normal(size=(1, 9, 6, 4)), random.normal(size=(1, 9, 2, 4))
    policy = DMC(neuron=neuron, offset=0.2, epsilon=0.01, per=per)
    index = {"first": 0, "last": -1}[neuron]
    with jax.enable_x64(True):
        decisions = policy.decide(shown(q, k))
        cleared_q, cleared_k = policy.clear_borrowed(jnp.asarray(q), jnp.asarray(k))
    options = dict(neuron=index, offset=0.2, per=per)
    logits = dmc.merge_logits(k[0], **options)
    assert (np.ptp(logits, axis=1) == 0).all() == (per == "layer")
    chex.assert_trees_all_close(decisions.logits[0].T, logits, rtol=1e-7, atol=1e-12)
    marks = logits > 0
    marks[0] = False
    chex.assert_trees_all_equal(decisions.marks[0].T, marks)
    omega = dmc.importance_weights(q[0], 2, epsilon=0.01, **options)
    chex.assert_trees_all_close(decisions.importance[0].T, omega, rtol=1e-7, atol=1e-12)
    chex.assert_trees_all_equal(cleared_q, dmc.without_neuron(q, index))
    chex.assert_trees_all_equal(cleared_k, dmc.without_neuron(k, index))


@functools.partial(jax.jit, static_argnums=0)
def relaxed(policy, q, k, positions, noise):
    tokens = tokens_of(k, q=q, v=2 * k, positions=positions)
    chunk = chunk_of(tokens, decisions=policy.decide(tokens))
    return policy.relax(chunk, jnp.asarray(noise))


@pytest.mark.parametrize("window", [3, None])
def test_soft_form_does_not_cross_documents(window):
    """No token is merged across packed documents, or counted as merged."""
    random = np.random.default_rng(6)
    q, k = random.normal(size=(1, 11, 4, 4)), random.normal(size=(1, 11, 2, 4))
    noise = random.logistic(size=(1, 2, 11))
    positions = np.array([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5]])
    policy = DMC(offset=0.1, temperature=0.8, window=window)
    with jax.enable_x64(True):
        whole = relaxed(policy, q, k, positions, noise)
        for part in (slice(0, 5), slice(5, 11)):
            alone = relaxed(policy, q[:, part], k[:, part], positions[:, part], noise[..., part])
            chex.assert_trees_all_close(whole.k[:, part], alone.k, rtol=1e-7, atol=1e-13)
            chex.assert_trees_all_close(whole.v[:, part], alone.v, rtol=1e-7, atol=1e-13)
            chex.assert_trees_all_equal(whole.bias[..., part], alone.bias)
            chex.assert_trees_all_equal(whole.decisions[..., part], alone.decisions)
    logits = dmc.merge_logits(k[0, 5:], offset=0.1)
    alpha, hard, log_keep = dmc.gate(logits, noise[0, :, 5:].T, 0.8)
    chex.assert_trees_all_equal(whole.decisions[0, :, 5:].T, hard)
    chex.assert_trees_all_close(whole.bias[0, :, 5:-1].T, log_keep[1:], rtol=1e-7, atol=1e-12)
    assert not np.asarray(whole.bias)[..., [4, 10]].any()
    omega = dmc.importance_weights(q[0, 5:], 2, offset=0.1)
    want = dmc.pool(k[0, 5:, 1], alpha[:, 1], omega[:, 1], window)
    chex.assert_trees_all_close(whole.k[0, 5:, 1], want, rtol=1e-7, atol=1e-12)
