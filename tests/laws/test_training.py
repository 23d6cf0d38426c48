"""Law 7: the soft form of training converges to the hard form of inference.

The soft form itself is also compared with the simulation, including the noise, so that it is the
paper's relaxation that converges.
"""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dms_jax.errors import ConfigError
from dms_jax.model.attention import Relaxation
from dms_jax.policies import DMC, DMS, POLICIES, FixedPooling, KVzap
from tests.laws.rows import model_of
from tests.laws.simulations import dmc_neuron, dms_decisions, merge_decisions, scorer_outputs
from tests.oracles import dmc, dms, transformer, vanilla
from tests.oracles.trace import Trace
from tests.support.instances import first_of_each, further
from tests.support.models import oracle_weights, random_tokens

TOKENS = random_tokens(7, 2, 21)
POLICIES_UNDER_TEST = [
    DMS(window=3, source="adapter"),
    DMS(window=0, shift=0, alpha_scale=4.0, alpha_offset=0.5),
    DMS(window=5, shift=5, per="layer", alpha_scale=3.0),
    DMC(offset=0.1),
    DMC(offset=-0.3, neuron="first", per="layer", window=3),
    DMC(offset=0.1, importance="uniform", window=None),
    KVzap(window=3, hidden=6, sinks=2),
]
every_form = pytest.mark.parametrize(
    "policy", first_of_each(POLICIES_UNDER_TEST, by=type), ids=repr
)
ONE_OF_EACH = list({type(policy): policy for policy in reversed(POLICIES_UNDER_TEST)}.values())


def model_for(policy):
    return model_of(2, policy.retrofit.adapter)


@jax.jit
def soft(model, policy, tokens, relaxation):
    return model(tokens, policy, relaxation=relaxation)


@jax.jit
def hard(model, policy, tokens):
    return model(tokens, policy)


def simulate_soft(policy, layer, noise):
    """Noise [T, K] of one sequence and layer -> the outputs of training's attention."""
    forms = {DMC: soft_dmc, DMS: soft_dms, KVzap: soft_kvzap}
    return forms[type(policy)](policy, layer, noise)


def soft_dmc(policy, layer, noise):
    logits, omega = merge_decisions(policy, layer)
    alpha, decisions, log_keep = dmc.gate(logits, noise, policy.temperature, policy.per)
    outputs = dmc.soft_attention(
        layer.q,
        layer.k,
        layer.v,
        alpha,
        omega,
        log_keep,
        cos=layer.cos,
        sin=layer.sin,
        window=policy.window,
        neuron=dmc_neuron(policy),
    )
    return outputs, decisions


def soft_dms(policy, layer, noise):
    options = dict(alpha_scale=policy.alpha_scale, alpha_offset=policy.alpha_offset)
    if policy.source == "adapter":
        logits = layer.own * policy.alpha_scale - policy.alpha_offset
        q, k, v = layer.rotated
    else:
        logits, q, k = dms.from_query_neuron(layer.q, layer.k, layer.cos, layer.sin, **options)
        v = layer.v
    _, _, decisions, bias = dms.gate(logits, noise, policy.temperature, policy.per)
    outputs = dms.soft_attention(q, k, v, bias, window=policy.window, shift=policy.shift)
    return outputs, decisions


def soft_kvzap(policy, layer, noise):
    scores, _ = scorer_outputs(layer)
    _, _, decisions, bias = dms.gate(policy.threshold - scores, noise, policy.temperature)
    decisions[: policy.sinks] = bias[: policy.sinks] = 0
    outputs = dms.soft_attention(*layer.rotated, bias, window=policy.window, shift=0)
    return outputs, decisions


@pytest.mark.parametrize(
    ("policy", "noisy"),
    first_of_each(
        [(policy, True) for policy in POLICIES_UNDER_TEST]
        + [(policy, False) for policy in ONE_OF_EACH],
        by=lambda pair: type(pair[0]),
    ),
    ids=repr,
)
def test_soft_form_equals_the_paper(policy, noisy):
    policy = dataclasses.replace(policy, temperature=0.7)
    model = model_for(policy)
    keys = jax.random.split(jax.random.key(3), len(TOKENS)) if noisy else None
    got = soft(model, policy, TOKENS, Relaxation(noise_keys=keys))
    logits = np.asarray(model.unembed(got.hidden))
    kv_heads = model.config.num_kv_heads
    shape = (kv_heads, TOKENS.shape[1])
    for row, tokens in enumerate(TOKENS):
        decisions = []

        def attend(layer, row=row, decisions=decisions):
            noise = np.zeros(shape)
            if noisy:
                key = jax.random.fold_in(keys[row], layer.index)
                noise = jax.random.logistic(key, shape, np.dtype(float))
            outputs, made = simulate_soft(policy, layer, np.asarray(noise).T)
            decisions.append(made.T)
            return Trace(outputs, [], [], [])

        want = transformer.run(oracle_weights(model), tokens, attend)
        assert np.abs(logits[row] - want.logits).max() < 1e-10
        # Straight-through: hard numbers forward.
        chex.assert_trees_all_equal(np.asarray(got.decisions)[:, row], np.stack(decisions))
    if getattr(policy, "per", "head") == "layer":  # one decision for all heads, for any draws
        of_first = np.asarray(got.decisions)[:, :, :1]
        chex.assert_trees_all_equal(got.decisions, of_first.repeat(kv_heads, axis=2))
        assert 0 < of_first.mean() < 1


@every_form
def test_saturated_decisions_are_hard(policy):
    scale = dict(alpha_scale=1e6) if isinstance(policy, DMS) else dict(temperature=1e-9)
    saturated = dataclasses.replace(policy, **scale)
    model = model_for(policy)
    got = soft(model, saturated, TOKENS, Relaxation())
    want = hard(model, saturated, TOKENS)
    chex.assert_trees_all_equal(got.decisions, want.decisions)
    assert 0.1 < float(want.decisions.mean()) < 0.9
    assert float(jnp.abs(got.hidden - want.hidden).max()) < 1e-12


def scaled_borrowed(policy, q, k, scale):
    """Returns queries and keys with the policy's borrowed neurons multiplied by `scale`."""
    q, k = q.copy(), k.copy()
    if isinstance(policy, DMC):
        for x in (q, k):
            x[..., dmc_neuron(policy)] *= scale
    else:
        q[:, :: q.shape[1] // k.shape[1], -1] *= scale
    return q, k


@pytest.mark.parametrize(
    "policy",
    first_of_each([DMS(window=2, shift=0), DMC(neuron="first"), DMC()], by=type),
    ids=repr,
)
@pytest.mark.parametrize("scale", [0.3, 0.0, *further(1.0)])
def test_decaying_neuron_scales_down_in_attention(policy, scale):
    """Before the retrofit nothing is evicted, and the neuron is scaled down."""
    model = model_of(2, False)
    got = soft(model, policy, TOKENS, Relaxation(neuron_scale=jnp.asarray(scale)))
    logits = np.asarray(model.unembed(got.hidden))
    assert not np.asarray(got.decisions).any()

    def attend(layer):
        q, k = scaled_borrowed(policy, layer.q, layer.k, scale)
        q, k, v = dataclasses.replace(layer, q=q, k=k).rotated
        return vanilla.simulate(*scaled_borrowed(policy, q, k, scale), v)

    for row, tokens in enumerate(TOKENS):
        want = transformer.run(oracle_weights(model), tokens, attend)
        chex.assert_trees_all_close(logits[row], want.logits, rtol=0, atol=1e-10)
    if scale == 0 and isinstance(policy, DMS):
        unmarked = DMS(window=64)
        _, (q, k, v) = dms_decisions(unmarked, want.inputs[0])
        chex.assert_trees_all_close(
            vanilla.simulate(q, k, v).outputs, want.traces[0].outputs, rtol=1e-7, atol=1e-12
        )


def test_fixed_pooling_trains_as_in_inference():
    """Noise changes nothing, and gradients pass through means and masks."""
    policy, model = FixedPooling(every=3), model_of(2, False)
    want = hard(model, policy, TOKENS)
    keys = jax.random.split(jax.random.key(1), len(TOKENS))
    got = soft(model, policy, TOKENS, Relaxation(noise_keys=keys))
    chex.assert_trees_all_equal(got.decisions, want.decisions)
    assert float(jnp.abs(got.hidden - want.hidden).max()) < 1e-12
    merge, _ = merge_decisions(policy, transformer_input(model))
    chex.assert_trees_all_equal(np.asarray(got.decisions)[0, 0].T, merge)

    def loss(model):
        return (soft(model, policy, TOKENS, Relaxation()).hidden ** 2).mean()

    gradient = jax.grad(loss, allow_int=True)(model)
    leaves = jax.tree.leaves(gradient.layers.attention)
    chex.assert_tree_all_finite(leaves)
    assert all(np.abs(leaf).max() > 0 for leaf in leaves)


def transformer_input(model):
    """Returns the first layer's input for the first sequence."""
    attend = lambda layer: vanilla.simulate(*layer.rotated)  # noqa: E731
    return transformer.run(oracle_weights(model), TOKENS[0], attend).inputs[0]


@every_form
def test_the_loss_sees_every_decision(policy):
    """The straight-through decisions pass their gradient to the weights that decide."""
    model = model_for(policy)

    def share(model):
        return soft(
            model, dataclasses.replace(policy, temperature=3.0), TOKENS, Relaxation()
        ).decisions.mean()

    gradient = jax.jit(jax.grad(share, allow_int=True))(model)
    layers = gradient.layers
    decider = layers.adapter if policy.retrofit.adapter else layers.attention
    per_layer = [jnp.abs(leaf).reshape(len(leaf), -1).max(1) for leaf in jax.tree.leaves(decider)]
    assert (jnp.stack(per_layer).max(0) > 1e-6).all()


def test_policies_without_soft_form_are_refused():
    model = model_of(2, False)
    for policy in (policy() for policy in POLICIES.values()):
        if policy.parallel == "always" and not policy.retrofit.possible:
            with pytest.raises(ConfigError, match=f"{policy.name} has no trainable form"):
                model(jnp.asarray(TOKENS), policy, relaxation=Relaxation())
