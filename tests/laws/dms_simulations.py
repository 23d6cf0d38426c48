"""Simulations of DMS for the table: decisions from the layer's input, then eviction."""

import jax.numpy as jnp
import numpy as np

from dms_jax.policies import DMS, draws
from tests.oracles import dmc, dms, vanilla
from tests.oracles.transformer import LayerInput

PLENTY = 64  # longer than every sequence of the tests


def dms_decisions(policy: DMS, layer: LayerInput):
    """Returns decisions [T, K] and the rotated q, k, v that attention sees."""
    options = dict(alpha_scale=policy.alpha_scale, alpha_offset=policy.alpha_offset)
    if policy.source == "query_neuron":
        logits, q, k = dms.from_query_neuron(layer.q, layer.k, layer.cos, layer.sin, **options)
    else:
        weights = layer.weights
        logits = dms.from_adapter(
            layer.residual,
            weights.adapter_norm,
            weights.adapter.kernel.T,
            bias=weights.adapter.bias,
            epsilon=layer.epsilon,
            **options,
        )
        q, k, _ = layer.rotated
    if policy.decisions == "bernoulli":  # the draws are the policy's own
        rows = draws.row_hashes(policy.seed, jnp.asarray(layer.index), len(logits[0]))
        # For so many tokens that one shape is compiled.
        drawn = np.asarray(draws.token_uniforms(rows, jnp.arange(PLENTY)[None]))[0].T
        return (drawn[: len(logits)] < dmc.sigmoid(logits)).astype(int), (q, k, layer.v)
    return dms.decide(logits), (q, k, layer.v)


def simulate_dms(policy, layer, prompt_length, page_size):
    decisions, tensors = dms_decisions(policy, layer)
    return dms.simulate(
        *tensors, decisions=decisions, window=policy.window, shift=policy.shift, per=policy.per
    )


def simulate_dms_identity(policy, layer, prompt_length, page_size):
    """Simulates vanilla attention, with the borrowed neuron zeroed if there is one."""
    _, tensors = dms_decisions(policy, layer)
    return vanilla.simulate(*tensors)
