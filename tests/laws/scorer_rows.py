"""Rows of the policies whose scorer learned from attention, and their simulation."""

import functools

import numpy as np

from dms_jax.policies import KVpop, KVzap
from tests.laws.row import Row
from tests.oracles import importance, kvpop, kvzap
from tests.oracles.transformer import LayerInput

LONG = 64  # longer than every sequence of the tests
DENSE = "dense_then_evict"


def outputs(layer: LayerInput) -> tuple[np.ndarray, np.ndarray]:
    """Returns the outputs of a layer's scorer, both [T, K]; zeros for one that it lacks."""
    weights = layer.weights
    x = importance.features(
        layer.residual, weights.adapter_norm, weights.adapter_hidden, layer.epsilon
    )
    own = importance.SCALE * weights.adapter(x) + importance.LEVEL
    if weights.adapter_late is None:
        return own, np.zeros_like(own)
    return own, importance.SCALE * weights.adapter_late(x)


def simulate_kvzap(policy: KVzap, layer, prompt_length, page_size):
    scores, _ = outputs(layer)
    return kvzap.simulate(
        *layer.rotated,
        scores=scores,
        threshold=policy.threshold,
        window=policy.window,
        sinks=policy.sinks,
    )


def simulate_kvpop(policy: KVpop, layer, prompt_length, page_size):
    own, late = outputs(layer)
    return kvpop.simulate(
        *layer.rotated,
        prompt_length,
        own=own,
        late=late,
        budget=policy.budget,
        window=policy.window,
        prefill=policy.prefill,
    )


def rows() -> list[Row]:
    uneven = functools.partial(Row, simulate=simulate_kvzap)
    even = functools.partial(Row, simulate=simulate_kvpop, ordered=False)
    return [
        uneven(KVzap(window=0, hidden=0, sinks=0), group=1, page_size=3),
        uneven(KVzap(window=4, hidden=6, threshold=-5.5), group=2, page_size=5),
        uneven(KVzap(window=3, hidden=5, threshold=-6.5, sinks=1), group=4, page_size=4),
        uneven(KVzap(window=6, hidden=0, threshold=-5.0, sinks=9), group=8, page_size=7),
        uneven(KVzap(window=2, hidden=4, threshold=-1e6), group=4, page_size=5, identity=True),
        # Not window 0: equal tokens have equal scores in the first layer, and which one goes is
        # then a matter of rounding.
        even(KVpop(budget=2, window=1, hidden=0), group=1, page_size=3),
        even(KVpop(budget=8, window=3, hidden=6), group=2, page_size=5),
        even(KVpop(budget=7, window=4, hidden=5), group=4, page_size=4),
        even(KVpop(budget=12, window=5, hidden=0), group=8, page_size=3),
        even(KVpop(budget=LONG, window=2, hidden=4), group=4, page_size=5, identity=True),
        even(
            KVpop(budget=9, window=4, hidden=6, prefill=DENSE),
            group=2,
            page_size=4,
            cuts="after the prompt",
        ),
        even(
            KVpop(budget=6, window=2, hidden=0, prefill=DENSE),
            group=4,
            page_size=3,
            cuts="after the prompt",
        ),
    ]
