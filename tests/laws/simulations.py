"""Every policy's simulation: from a layer's inputs to the trace of an oracle.

A new policy has its function here, by its type, unless it ranks tokens (`oracles/scored.py`).
"""

import dataclasses
import fractions
import functools
import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np

import dms_jax
from dms_jax.policies import draws
from dms_jax.policies.merging import Merging
from dms_jax.policies.periodic_eviction import PeriodicEviction, Scorer
from tests.laws.rows import BY_TOKEN, PLENTY, in_one_pass_by_its_window
from tests.oracles import (
    dmc,
    dms,
    float8,
    h2o,
    importance,
    kcache,
    kvpop,
    kvzap,
    quest,
    rope,
    scored,
    streaming,
    tova,
    vanilla,
)
from tests.oracles.trace import Trace
from tests.oracles.transformer import LayerInput, unchanged
from tests.support.chunks import tokens_of
from tests.support.models import tiny_config

LAYERS = 2
THETA = tiny_config().rope.theta
# Returns vectors after a round trip through a cache of few bits.
STORED = {None: unchanged, "float8_e4m3": float8.snap}


@functools.singledispatch
def simulate(policy, layer: LayerInput, prompt_length: int, page_size: int) -> Trace:
    """Simulates a policy in one layer of one sequence."""
    raise NotImplementedError(policy)


def in_tokens(policy: dms_jax.Policy, length: int) -> dms_jax.Policy:
    """Returns the policy with its budgets in tokens, for a sequence that reaches `length`."""
    if hasattr(policy, "scorer"):
        return dataclasses.replace(policy, scorer=in_tokens(policy.scorer, length))
    ratio = getattr(policy, "compression_ratio", None)
    if in_one_pass_by_its_window(policy):  # as if each token had run by itself
        return dataclasses.replace(policy, prefill=BY_TOKEN)
    if ratio is None:
        return policy
    field = "top" if isinstance(policy, dms_jax.KCache) else "budget"
    share = math.floor(length / fractions.Fraction(str(ratio)))
    return dataclasses.replace(policy, **{field: share}, compression_ratio=None)


@simulate.register
def _(policy: dms_jax.Vanilla, layer, prompt_length, page_size):
    return vanilla.simulate(*layer.rotated)


# -- delayed eviction ------------------------------------------------------------------------------


def dms_decisions(policy: dms_jax.DMS, layer: LayerInput):
    """Returns decisions [T, K] and the rotated q, k, v that attention sees."""
    if policy.source == "query_neuron":
        scale = dict(alpha_scale=policy.alpha_scale, alpha_offset=policy.alpha_offset)
        logits, q, _ = dms.from_query_neuron(layer.q, layer.k, layer.cos, layer.sin, **scale)
        _, k, v = layer.rotated
    else:
        logits = layer.own * policy.alpha_scale - policy.alpha_offset
        q, k, v = layer.rotated
    if policy.decisions == "bernoulli":  # the draws are the policy's own
        drawn = token_draws(policy.seed, layer.index, logits.shape[1])
        return (drawn[: len(logits)] < dmc.sigmoid(logits)).astype(int), (q, k, v)
    return dms.decide(logits), (q, k, v)


@functools.cache
def token_draws(seed: int, layer: int, kv_heads: int) -> np.ndarray:
    """Returns the draws for a fixed number of tokens, so that one shape is compiled, [T, K]."""
    rows = draws.row_hashes(seed, jnp.asarray(layer), kv_heads)
    return np.asarray(draws.token_uniforms(rows, jnp.arange(PLENTY)[None]))[0].T


@simulate.register
def _(policy: dms_jax.DMS, layer, prompt_length, page_size):
    decisions, tensors = dms_decisions(policy, layer)
    return dms.simulate(
        *tensors, decisions=decisions, window=policy.window, shift=policy.shift, per=policy.per
    )


@simulate.register
def _(policy: dms_jax.StreamingLLM, layer, prompt_length, page_size):
    recent = policy.budget - policy.sinks
    options = dict(sinks=policy.sinks, recent=recent, prefill=policy.prefill)
    return streaming.simulate(*layer.rotated, prompt_length, **options)


@functools.cache
def random_marks(
    policy: dms_jax.RandomEviction, layer: int, kv_heads: int, head_dim: int
) -> np.ndarray:
    """Returns the marks for a fixed number of tokens, so that one shape is compiled, [T, K]."""
    nothing = np.zeros((1, PLENTY, kv_heads, head_dim))
    return np.asarray(policy.decide(tokens_of(nothing, layer=layer)).marks)[0].T


@simulate.register
def _(policy: dms_jax.RandomEviction, layer, prompt_length, page_size):
    length, kv_heads, head_dim = layer.k.shape
    marks = random_marks(policy, layer.index, kv_heads, head_dim)[:length]
    return dms.simulate(*layer.rotated, decisions=marks, window=policy.window, shift=0)


def scorer_outputs(layer: LayerInput) -> tuple[np.ndarray, np.ndarray]:
    """Returns the predictions of a layer's scorer, both [T, K]; zeros for a missing output."""
    own = importance.SCALE * layer.own + importance.LEVEL
    late = np.zeros_like(own) if layer.late is None else importance.SCALE * layer.late
    return own, late


@simulate.register
def _(policy: dms_jax.KVzap, layer, prompt_length, page_size):
    scores, _ = scorer_outputs(layer)
    options = dict(threshold=policy.threshold, window=policy.window, sinks=policy.sinks)
    return kvzap.simulate(*layer.rotated, scores=scores, **options)


# -- merging --------------------------------------------------------------------------------------


def dmc_neuron(policy: dms_jax.DMC) -> int:
    return {"first": 0, "last": -1}[policy.neuron]


def merge_decisions(policy: Merging, layer: LayerInput):
    """Returns merge logits (or decisions), importance, both [T, K]."""
    if isinstance(policy, dms_jax.FixedPooling):
        return dmc.fixed_pooling(*layer.k.shape[:2], every=policy.every)
    options = dict(neuron=dmc_neuron(policy), offset=policy.offset, per=policy.per)
    omega = dmc.importance_weights(layer.q, layer.k.shape[1], epsilon=policy.epsilon, **options)
    if policy.importance == "uniform":
        omega = np.ones_like(omega)
    return dmc.merge_logits(layer.k, **options), omega


def merging(policy: Merging) -> dict:
    """Returns the window of the means, and the excluded neuron."""
    if isinstance(policy, dms_jax.FixedPooling):
        return dict(window=None, neuron=None)
    return dict(window=policy.window, neuron=dmc_neuron(policy))


@simulate.register
def _(policy: Merging, layer, prompt_length, page_size):
    logits, omega = merge_decisions(policy, layer)
    return dmc.simulate(
        layer.q,
        layer.k,
        layer.v,
        cos=layer.cos,
        sin=layer.sin,
        decisions=logits > 0,
        importance=omega,
        stored=layer.stored,
        center=layer.key_center,
        **merging(policy),
    )


def stored_keys(policy: dms_jax.Policy, layer: LayerInput) -> np.ndarray:
    """Returns the keys that are read from the slots, by the ids of the trace."""
    if not isinstance(policy, Merging):
        return layer.rotated[1]
    # The merged key of the segment that ends at each token, rotated to that token.
    logits, omega = merge_decisions(policy, layer)
    window, neuron = merging(policy).values()
    cleared = dmc.without_neuron(layer.k, neuron)
    pooled = [
        dmc.pool(cleared[:, h], logits[:, h] > 0, omega[:, h], window)
        for h in range(layer.k.shape[1])
    ]
    rotated = rope.rotate_tokens(np.stack(pooled, axis=1), layer.cos, layer.sin)
    return layer.stored_keys(dmc.without_neuron(rotated, neuron))


# -- one victim per step ---------------------------------------------------------------------------


@simulate.register
def _(policy: dms_jax.TOVA, layer, prompt_length, page_size):
    q, k, v = layer.rotated
    options = dict(budget=policy.budget, prefill=policy.prefill)
    if policy.per == "layer":
        return tova.simulate(q, k, v, prompt_length, **options)
    heads = k.shape[1]
    of_heads = zip(*(np.split(x, heads, axis=1) for x in (q, k, v)), strict=True)
    return side_by_side([tova.simulate(*one, prompt_length, **options) for one in of_heads])


def side_by_side(traces: list[Trace]) -> Trace:
    """Joins the traces of separately simulated KV heads into one layer."""

    def joined(field: str) -> list:
        steps = zip(*(getattr(trace, field) for trace in traces), strict=True)
        return [[row for part in step for row in part] for step in steps]

    outputs = np.concatenate([trace.outputs for trace in traces], axis=1)
    return Trace(outputs, *map(joined, ("live", "kept", "attended")))


@simulate.register
def _(policy: dms_jax.H2O, layer, prompt_length, page_size):
    heavy = policy.budget // 2
    options = dict(heavy=heavy, recent=policy.budget - heavy, prefill=policy.prefill)
    return h2o.simulate(*layer.rotated, prompt_length, **options)


@simulate.register
def _(policy: dms_jax.KVpop, layer, prompt_length, page_size):
    own, late = scorer_outputs(layer)
    options = dict(budget=policy.budget, window=policy.window, prefill=policy.prefill)
    return kvpop.simulate(*layer.rotated, prompt_length, own=own, late=late, **options)


# -- rows cut by scores ---------------------------------------------------------------------------


def worth_of(scorer: Scorer, layer: LayerInput, prompt_length: int) -> scored.Worth:
    """Returns the scores of a policy that ranks tokens."""
    if isinstance(scorer, dms_jax.RandomSelection):
        return own_draws(scorer, layer)
    given = dict(zip("qkv", layer.rotated, strict=True), queries=layer.q, theta=THETA)
    given |= dict(prompt_length=prompt_length, centres=None)
    return called_with(scored.RANKINGS[scorer.name].worth, scorer, **given)


def when_of(scorer: Scorer) -> scored.When | None:
    """Returns the policy's rule for cuts, if it has one."""
    when = scored.RANKINGS[scorer.name].when if scorer.name in scored.RANKINGS else None
    return None if when is None else called_with(when, scorer)


def called_with(function, scorer: Scorer, **given):
    """Calls a function with those of its parameters that are given or are policy options."""
    given |= {field.name: getattr(scorer, field.name) for field in dataclasses.fields(scorer)}
    return function(**{name: given[name] for name in inspect.signature(function).parameters})


def own_draws(scorer: dms_jax.RandomSelection, layer: LayerInput) -> scored.Worth:
    """The scores are the policy's own draws; only the eviction is simulated."""
    kv_heads = layer.k.shape[1]

    def worth(t, held):
        drawn = slot_draws(scorer.seed, layer.index, kv_heads, t)
        return [drawn[head, : len(ids)] for head, ids in enumerate(held)]

    return worth


@functools.cache
def slot_draws(seed: int, layer: int, kv_heads: int, t: int) -> np.ndarray:
    """Returns the draws of a cut for a fixed number of slots (one compiled shape), [K, S]."""
    scorer = dms_jax.RandomSelection(seed=seed)
    drawn = drawing(scorer, kv_heads, jnp.asarray(layer), jnp.asarray([t]))
    return np.asarray(drawn, float)[0]


@functools.partial(jax.jit, static_argnums=(0, 1))
def drawing(scorer: dms_jax.RandomSelection, kv_heads: int, layer, t):
    return scorer.draw(layer, jnp.arange(kv_heads), t, PLENTY)


@simulate.register
def _(policy: PeriodicEviction, layer, prompt_length, page_size):
    alpha, beta = None, None
    scorer = policy
    while hasattr(scorer, "scorer"):
        alpha, beta = getattr(scorer, "alpha", alpha), getattr(scorer, "beta", beta)
        scorer = scorer.scorer
    budget = scorer.budget
    if beta is not None:
        fields = {dms_jax.SnapKV: ["window"], dms_jax.ExpectedAttention: ["sinks", "recent"]}
        always = sum(getattr(scorer, name) for name in fields.get(type(scorer), []))
        budget = scored.pyramid(budget, always, beta, layer.index, LAYERS)
    return scored.simulate(
        *layer.rotated,
        prompt_length,
        worth=worth_of(scorer, layer, prompt_length),
        budget=budget,
        interval=scorer.interval,
        alpha=alpha,
        when=when_of(scorer),
    )


# -- selective reading ----------------------------------------------------------------------------


@simulate.register
def _(policy: dms_jax.Quest, layer, prompt_length, page_size):
    options = dict(
        budget=policy.budget,
        page_size=page_size,
        force_last_page=policy.force_last_page,
        layer=layer.index,
        dense_layers=policy.dense_layers,
    )
    if isinstance(policy.over, dms_jax.Vanilla):
        return quest.simulate(*layer.rotated, prompt_length, per=policy.per, **options)
    _, tensors = dms_decisions(policy.over, layer)
    kept = simulate(policy.over, layer, prompt_length, page_size)
    return quest.select_over(kept, *tensors, prompt_length, **options)


@simulate.register
def _(policy: dms_jax.KCache, layer, prompt_length, page_size):
    options = dict(
        top=policy.top,
        layer=layer.index,
        device_layers=policy.first_layers,
    )
    if isinstance(policy.over, dms_jax.Vanilla):
        return kcache.simulate(*layer.rotated, prompt_length, **options)
    _, tensors = dms_decisions(policy.over, layer)
    kept = simulate(policy.over, layer, prompt_length, page_size)
    return kcache.simulate(*tensors, prompt_length, kept=kept, **options)
