"""Every policy under the laws: a row gives the policy and the simulation that it must equal.

To test a policy under all laws, add its rows: at least one for each number of query heads per KV
head (1, 2, 4, 8), with hyper-parameters and page sizes spread over them, and one without eviction.
"""

import functools

import numpy as np

from dms_jax.policies import (
    DMC,
    DMS,
    H2O,
    TOVA,
    FixedPooling,
    Quest,
    RandomEviction,
    StreamingLLM,
    Vanilla,
)
from tests.laws import combined_rows, scored_rows, scorer_rows
from tests.laws.dms_simulations import simulate_dms, simulate_dms_identity
from tests.laws.row import Row
from tests.oracles import dmc, dms, h2o, quest, rope, streaming, tova, vanilla
from tests.oracles.trace import Trace
from tests.oracles.transformer import LayerInput
from tests.support.chunks import tokens_of


def simulate_vanilla(policy, layer, prompt_length, page_size):
    del policy, prompt_length, page_size
    return vanilla.simulate(*layer.rotated)


def dmc_neuron(policy: DMC) -> int:
    return {"first": 0, "last": -1}[policy.neuron]


def dmc_decisions(policy: DMC, layer: LayerInput):
    """Returns merge logits and importance, both [T, K]."""
    options = dict(neuron=dmc_neuron(policy), offset=policy.offset, per=policy.per)
    omega = dmc.importance_weights(layer.q, layer.k.shape[1], epsilon=policy.epsilon, **options)
    if policy.importance == "uniform":
        omega = np.ones_like(omega)
    return dmc.merge_logits(layer.k, **options), omega


def simulate_dmc(policy, layer, prompt_length, page_size):
    logits, omega = dmc_decisions(policy, layer)
    return dmc.simulate(
        layer.q,
        layer.k,
        layer.v,
        cos=layer.cos,
        sin=layer.sin,
        window=policy.window,
        neuron=dmc_neuron(policy),
        decisions=logits > 0,
        importance=omega,
    )


def merged_keys(layer: LayerInput, alpha, omega, window: int | None, neuron: int | None):
    """Returns the merged key of the segment that ends at each token, rotated to that token."""
    cleared = dmc.without_neuron(layer.k, neuron)
    heads = range(layer.k.shape[1])
    pooled = np.stack(
        [dmc.pool(cleared[:, h], alpha[:, h], omega[:, h], window) for h in heads], axis=1
    )
    return dmc.without_neuron(rope.rotate_tokens(pooled, layer.cos, layer.sin), neuron)


def dmc_keys(policy, layer):
    logits, omega = dmc_decisions(policy, layer)
    return merged_keys(layer, logits > 0, omega, policy.window, dmc_neuron(policy))


def simulate_dmc_identity(policy, layer, prompt_length, page_size):
    neuron = dmc_neuron(policy)
    q, k = (dmc.without_neuron(x, neuron) for x in (layer.q, layer.k))
    q, k = (dmc.without_neuron(rope.rotate_tokens(x, layer.cos, layer.sin), neuron) for x in (q, k))
    return vanilla.simulate(q, k, layer.v)


def fixed_decisions(policy: FixedPooling, layer: LayerInput):
    return dmc.fixed_pooling(*layer.k.shape[:2], every=policy.every)


def simulate_fixed(policy, layer, prompt_length, page_size):
    merge, weights = fixed_decisions(policy, layer)
    angles = dict(cos=layer.cos, sin=layer.sin)
    return dmc.simulate(
        layer.q, layer.k, layer.v, neuron=None, decisions=merge, importance=weights, **angles
    )


def fixed_keys(policy, layer):
    return merged_keys(layer, *fixed_decisions(policy, layer), None, None)


def simulate_streaming(policy, layer, prompt_length, page_size):
    recent = policy.budget - policy.sinks
    return streaming.simulate(*layer.rotated, sinks=policy.sinks, recent=recent)


@functools.cache
def random_marks(policy: RandomEviction, layer: int, kv_heads: int, head_dim: int) -> np.ndarray:
    """Returns the draws of so many tokens that one shape of them is compiled, [T, K]."""
    nothing = np.zeros((1, LONG, kv_heads, head_dim))
    return np.asarray(policy.decide(tokens_of(nothing, layer=layer)).marks)[0].T


def simulate_random(policy, layer, prompt_length, page_size):
    """Simulates eviction with the policy's own random draws."""
    length, kv_heads, head_dim = layer.k.shape
    marks = random_marks(policy, layer.index, kv_heads, head_dim)[:length]
    return dms.simulate(*layer.rotated, decisions=marks, window=policy.window, shift=0)


def simulate_tova(policy, layer, prompt_length, page_size):
    q, k, v = layer.rotated
    if policy.per == "layer":
        return tova.simulate(q, k, v, prompt_length, budget=policy.budget, prefill=policy.prefill)
    group = q.shape[1] // k.shape[1]
    heads = [
        tova.simulate(
            q[:, head * group : (head + 1) * group],
            k[:, head : head + 1],
            v[:, head : head + 1],
            prompt_length,
            budget=policy.budget,
            prefill=policy.prefill,
        )
        for head in range(k.shape[1])
    ]
    return side_by_side(heads)


def simulate_h2o(policy, layer, prompt_length, page_size):
    heavy = policy.budget // 2
    return h2o.simulate(
        *layer.rotated,
        prompt_length,
        heavy=heavy,
        recent=policy.budget - heavy,
        prefill=policy.prefill,
    )


def side_by_side(traces: list[Trace]) -> Trace:
    """Joins the traces of KV heads that were simulated separately into one layer."""

    def joined(field: str) -> list:
        steps = zip(*(getattr(trace, field) for trace in traces), strict=True)
        return [[row for part in step for row in part] for step in steps]

    return Trace(
        outputs=np.concatenate([trace.outputs for trace in traces], axis=1),
        live=joined("live"),
        kept=joined("kept"),
        attended=joined("attended"),
    )


def simulate_quest(policy, layer, prompt_length, page_size):
    return quest.simulate(
        *layer.rotated,
        prompt_length,
        budget=policy.budget,
        page_size=page_size,
        force_last_page=policy.force_last_page,
        per=policy.per,
        layer=layer.index,
        dense_layers=policy.dense_layers,
    )


DENSE = "dense_then_evict"
LONG = 64  # longer than every sequence of the tests


def dms_rows() -> list[Row]:
    make = functools.partial(Row, simulate=simulate_dms)
    same = functools.partial(Row, simulate=simulate_dms_identity, identity=True)
    return [
        make(DMS(window=0, shift=0), group=1, page_size=3),
        make(DMS(window=4, source="adapter"), group=2, page_size=5),
        make(DMS(window=6, shift=6, per="layer"), group=4, page_size=4),
        make(DMS(window=3, shift=4, source="adapter", alpha_offset=40.0), group=8, page_size=7),
        make(DMS(window=0, shift=1), group=4, page_size=16),
        make(
            DMS(window=2, alpha_scale=2.0, alpha_offset=0.5, decisions="bernoulli", seed=3),
            group=2,
            page_size=3,
        ),
        same(DMS(window=LONG), group=2, page_size=5),
        same(DMS(window=2, source="adapter", alpha_offset=1e6), group=1, page_size=3),
    ]


def dmc_rows() -> list[Row]:
    make = functools.partial(Row, simulate=simulate_dmc, keys=dmc_keys)
    return [
        make(DMC(offset=0.0), group=1, page_size=3),
        make(DMC(offset=0.4, neuron="first", window=2), group=2, page_size=4),
        make(DMC(offset=0.1, per="layer", importance="uniform"), group=2, page_size=7),
        make(DMC(offset=-0.5, window=3), group=4, page_size=5),
        make(DMC(offset=0.2, window=None), group=8, page_size=16),
        Row(DMC(offset=1e6), simulate_dmc_identity, 4, 5, keys=dmc_keys, identity=True),
    ]


def fixed_rows() -> list[Row]:
    make = functools.partial(Row, simulate=simulate_fixed, keys=fixed_keys)
    return [
        make(FixedPooling(every=3), group=1, page_size=4),
        make(FixedPooling(every=2), group=2, page_size=3),
        make(FixedPooling(every=5), group=4, page_size=2),
        make(FixedPooling(every=LONG), group=8, page_size=3),
        make(FixedPooling(every=1), group=4, page_size=5, identity=True),
    ]


def training_free_rows() -> list[Row]:
    sinks = functools.partial(Row, simulate=simulate_streaming, ordered=False)
    chance = functools.partial(Row, simulate=simulate_random)
    victims = functools.partial(Row, simulate=simulate_tova, ordered=False)
    cut = functools.partial(victims, cuts="after the prompt")
    heavy = functools.partial(Row, simulate=simulate_h2o, ordered=False)
    cut_heavy = functools.partial(heavy, cuts="after the prompt")
    pages = functools.partial(Row, simulate=simulate_quest, selects=True)
    return [
        sinks(StreamingLLM(budget=5, sinks=0), group=1, page_size=3),
        sinks(StreamingLLM(budget=8, sinks=2), group=2, page_size=5),
        sinks(StreamingLLM(budget=5, sinks=4), group=4, page_size=4),
        sinks(StreamingLLM(budget=12, sinks=3), group=8, page_size=5),
        sinks(StreamingLLM(budget=LONG), group=2, page_size=7, identity=True),
        chance(RandomEviction(window=0, rate=0.5), group=1, page_size=4),
        chance(RandomEviction(window=3, rate=0.7, spread=0.2), group=2, page_size=3),
        chance(RandomEviction(window=7, rate=1.0), group=4, page_size=5),
        chance(RandomEviction(window=2, rate=0.3, seed=7), group=8, page_size=3),
        chance(RandomEviction(window=3, rate=0.0), group=4, page_size=5, identity=True),
        victims(TOVA(budget=1), group=1, page_size=3),
        victims(TOVA(budget=8), group=2, page_size=5),
        victims(TOVA(budget=6, per="head"), group=4, page_size=4),
        victims(TOVA(budget=11), group=8, page_size=3),
        victims(TOVA(budget=LONG), group=1, page_size=5, identity=True),
        cut(TOVA(budget=7, prefill=DENSE), group=2, page_size=3),
        cut(TOVA(budget=5, prefill=DENSE, per="head"), group=4, page_size=4),
        heavy(H2O(budget=1), group=1, page_size=3),
        heavy(H2O(budget=8), group=2, page_size=5),
        heavy(H2O(budget=7), group=4, page_size=4),
        heavy(H2O(budget=12), group=8, page_size=3),
        heavy(H2O(budget=LONG), group=4, page_size=5, identity=True),
        cut_heavy(H2O(budget=9, prefill=DENSE), group=2, page_size=4),
        cut_heavy(H2O(budget=6, prefill=DENSE), group=4, page_size=3),
        pages(Quest(budget=12, dense_layers=1, force_last_page=False), group=1, page_size=4),
        pages(Quest(budget=8, dense_layers=1), group=2, page_size=4),
        pages(Quest(budget=6, dense_layers=0), group=4, page_size=3),
        pages(Quest(budget=15, dense_layers=0, force_last_page=False), group=8, page_size=5),
        pages(Quest(budget=8, dense_layers=0, per="kv_head"), group=2, page_size=4),
        pages(Quest(budget=9, dense_layers=1, per="kv_head"), group=4, page_size=3),
        pages(Quest(budget=LONG, dense_layers=0), group=4, page_size=5, identity=True),
    ]


def vanilla_rows() -> list[Row]:
    make = functools.partial(Row, Vanilla(), simulate_vanilla, identity=True)
    return [make(group=group, page_size=size) for group, size in ((1, 3), (2, 4), (4, 5), (8, 16))]


ROWS = [
    *vanilla_rows(),
    *dms_rows(),
    *dmc_rows(),
    *fixed_rows(),
    *training_free_rows(),
    *scored_rows.rows(),
    *scorer_rows.rows(),
    *combined_rows.rows(),
]
# Policies that agree with one pass over the whole sequence, wherever the prompt ends.
SPLIT_INVARIANT = {
    "Vanilla",
    "DMS",
    "DMC",
    "FixedPooling",
    "StreamingLLM",
    "RandomEviction",
    "TOVA",
    "H2O",
    "KVzap",
    "KVpop",
}
