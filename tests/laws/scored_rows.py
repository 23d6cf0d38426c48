"""Rows of the policies that cut rows by scores, and their simulation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from dms_jax.policies import (
    AdaKV,
    ExpectedAttention,
    KeyDiff,
    Knorm,
    PyramidKV,
    RandomSelection,
    SnapKV,
)
from tests.laws.row import Row
from tests.oracles import scored
from tests.support.models import tiny_config

THETA = tiny_config().rope.theta
LAYERS = 2
PLENTY = 64  # longer than every sequence of the tests


def worth_of(scorer, layer) -> scored.Worth:
    q, k, v = layer.rotated
    match scorer:
        case Knorm():
            return scored.knorm(k)
        case KeyDiff():
            return scored.keydiff(k)
        case SnapKV():
            return scored.snapkv(q, k, scorer.window, scorer.kernel)
        case ExpectedAttention():
            return scored.expected_attention(
                layer.q,
                k,
                v,
                theta=THETA,
                sinks=scorer.sinks,
                future=scorer.future,
                covariance=scorer.covariance,
                epsilon=scorer.epsilon,
            )
        case RandomSelection():
            return random_worth(scorer, layer.index, k.shape[1])


def random_worth(scorer: RandomSelection, layer: int, kv_heads: int) -> scored.Worth:
    """Returns the policy's own random scores; only the eviction is simulated."""

    def worth(t, held):
        drawn = np.asarray(draws(scorer, kv_heads, layer, t), float)[0]
        return [drawn[head, : len(ids)] for head, ids in enumerate(held)]

    return worth


@functools.partial(jax.jit, static_argnums=(0, 1))
def draws(scorer: RandomSelection, kv_heads: int, layer, t):
    """Returns the draws of a cut for so many slots that one shape of them is compiled."""
    return scorer.draw(jnp.asarray(layer), jnp.arange(kv_heads), jnp.asarray([t]), PLENTY)


def simulate(policy, layer, prompt_length, page_size):
    del page_size
    alpha, beta = None, None
    scorer = policy
    while hasattr(scorer, "scorer"):
        alpha, beta = getattr(scorer, "alpha", alpha), getattr(scorer, "beta", beta)
        scorer = scorer.scorer
    budget = scorer.budget
    if beta is not None:
        protected = {SnapKV: "window", ExpectedAttention: "sinks"}.get(type(scorer))
        always = getattr(scorer, protected) if protected else 0
        budget = scored.pyramid(budget, always, beta, layer.index, LAYERS)
    return scored.simulate(
        *layer.rotated,
        prompt_length,
        worth=worth_of(scorer, layer),
        budget=budget,
        interval=scorer.interval,
        alpha=alpha,
    )


def rows() -> list[Row]:
    """Returns rows that cover every number of query heads per KV head, and one without cuts."""
    make = functools.partial(Row, simulate=simulate, cuts="always")
    expected = ExpectedAttention
    return [
        make(SnapKV(budget=8, interval=3, window=1, kernel=1), group=1, page_size=3),
        make(SnapKV(budget=9, interval=4, window=3, kernel=5), group=2, page_size=4),
        make(SnapKV(budget=7, interval=None, window=4, kernel=3), group=4, page_size=5),
        make(SnapKV(budget=10, interval=1, window=8, kernel=3), group=8, page_size=3),
        make(SnapKV(budget=PLENTY, window=5), group=2, page_size=5, identity=True),
        make(Knorm(budget=1, interval=2), group=1, page_size=3),
        make(Knorm(budget=6, interval=None), group=4, page_size=3),
        make(KeyDiff(budget=8, interval=4), group=2, page_size=3),
        make(KeyDiff(budget=9, interval=2), group=8, page_size=3),
        make(expected(budget=6, interval=2, future=3, sinks=1), group=1, page_size=3),
        make(expected(budget=9, interval=4, future=16, epsilon=0.01), group=2, page_size=4),
        make(expected(budget=7, interval=None, sinks=0, covariance=False), group=4, page_size=5),
        make(RandomSelection(budget=8, interval=5, seed=3), group=2, page_size=4),
        make(AdaKV(SnapKV(budget=9, interval=4, window=3), alpha=0.5), group=2, page_size=4),
        make(AdaKV(PyramidKV(KeyDiff(budget=8, interval=3), beta=4)), group=4, page_size=5),
        make(PyramidKV(Knorm(budget=5, interval=2), beta=20), group=1, page_size=4),
        make(PyramidKV(SnapKV(budget=8, interval=3, window=3), beta=3), group=2, page_size=3),
    ]
