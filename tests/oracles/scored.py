"""Policies that score the tokens in the cache and cut it back to a budget.

A prompt attends to all of itself; after its last token every KV head is cut to the tokens of the
highest scores. From then on tokens are appended, and whenever the heads of the layer hold budget +
interval tokens on average, they are cut back after the attention of that token. Kept tokens stay in
order; among equal scores the later is kept. Scores of a KV head's tokens after the attention of t:

    Knorm               -|k_j| in 12 bits
    KeyDiff             -cos(k_j, mean_i k_i / |k_i|)
    SnapKV              the softmax weights of the last `window` queries, averaged over them, then
                        over `kernel` neighbours (zeros beyond the ends), then over the heads of
                        the group; the window itself always stays
    ExpectedAttention   queries are Gaussian before rotation, with the mean m and the covariance C
                        of those so far (the first `sinks` left out); R is the mean rotation of the
                        next n positions; exp(k R m / sqrt(d) + k R C R' k / 2d) normalised over the
                        tokens without the sinks and the `recent` last ones, which stay, averaged
                        over the group, plus epsilon, times |v_j|

Two cut nothing at the end of a prompt, and in its answer where t + 1 tokens have been seen, P of
them the prompt's (`when`):

    RKV                 every `interval` tokens of the answer, where heads hold budget + interval:
                        mix A_j - (1 - mix) R_j, see `rkv`; the window always stays
    TriAttention        where t + 1 is a multiple of `interval` and heads hold budget tokens beside
                        the prompt, which is below the budget and always stays: see `triattention`

AdaKV ranks the tokens of all heads of a layer together after each head has its alpha * budget best.
PyramidKV gives the layers budgets that fall linearly, see `pyramid`.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from tests.oracles import rope
from tests.oracles.trace import (
    Recorder,
    Trace,
    as_float64,
    attend_live,
    attention_weights,
    default_scale,
)

# (token t, tokens held by each KV head) -> the score of each token by KV head, inf to keep it.
Worth = Callable[[int, list[list[int]]], list[np.ndarray]]


# (tokens seen, tokens of the prompt, tokens held on average) -> whether rows are cut.
When = Callable[[int, int, float], bool]


class Ranking(NamedTuple):
    """The scores of a policy, and the options with which the laws run it."""

    worth: Callable[..., Worth]
    options: tuple[dict, ...]
    when: Callable[..., When] | None = None


RANKINGS: dict[str, Ranking] = {}  # by the name of the policy


def ranks(policy: str, *options: dict, when: Callable[..., When] | None = None):
    """Registers a policy's scores, and the options with which the laws run it.

    `when` builds the policy's rule for cuts from its options, if it has one.

    The names of the function's parameters select its inputs: the rotated `q`, `k` and `v`, the
    `queries` before rotation, the `theta`, or an option of the policy.
    """

    def register(worth: Callable[..., Worth]):
        RANKINGS[policy] = Ranking(worth, options, when)
        return worth

    return register


def simulate(
    q,
    k,
    v,
    prompt_length: int,
    *,
    worth: Worth,
    budget: int,
    interval: int | None,
    alpha: float | None = None,
    when: When | None = None,
) -> Trace:
    """Simulate over q [T, H, D] and k, v [T, K, D], all rotated already; `alpha` is AdaKV's."""
    q, k, v = as_float64(q, k, v)
    scale = default_scale(q, None)
    kv_heads = k.shape[1]
    recorder = Recorder(q.shape[1])
    held: list[list[int]] = [[] for _ in range(kv_heads)]
    for t in range(len(q)):
        held = [[*ids, t] for ids in held]
        live = held
        output = attend_live(q[t], k, v, live, scale)
        due = t == prompt_length - 1
        if t >= prompt_length and interval is not None:
            due = sum(map(len, held)) >= kv_heads * (budget + interval)
        if when is not None:
            answer, mean = t >= prompt_length, sum(map(len, held)) / kv_heads
            due = answer and when(t + 1, prompt_length, mean)
        if due and sum(map(len, held)) > kv_heads * budget:
            held = cut(held, worth(t, held), budget, alpha)
        recorder.step(output, live, kept=held)
    return recorder.trace()


def cut(
    held: list[list[int]], worth: list[np.ndarray], budget: int, alpha: float | None
) -> list[list[int]]:
    """Returns the tokens that each head keeps."""
    if alpha is None:
        return [best(ids, scores, budget) for ids, scores in zip(held, worth, strict=True)]
    worth = [scores.copy() for scores in worth]
    for scores in worth:
        scores[best(range(len(scores)), scores, int(alpha * budget))] = np.inf
    flat = [(score, h, i) for h, row in enumerate(worth) for i, score in enumerate(row)]
    taken = sorted(flat, reverse=True)[: len(held) * budget]
    return [sorted(held[h][i] for _, head, i in taken if head == h) for h in range(len(held))]


def best(ids: Sequence[int], scores: np.ndarray, count: int) -> list[int]:
    order = sorted(range(len(ids)), key=lambda i: (scores[i], i), reverse=True)
    return sorted(ids[i] for i in order[:count])


def pyramid(budget: int, protected: int, beta: int, layer: int, layers: int) -> int:
    """Returns a layer's budget: besides `protected`, from 2 b - b / beta down to b / beta."""
    beside = budget - protected
    low = beside // beta
    high = 2 * beside - low
    if layers == 1:
        return budget
    return max(1, protected + high - -(-layer * (high - low) // (layers - 1)))


@ranks("Knorm", dict(budget=6, interval=2))
def knorm(k) -> Worth:
    mantissa, exponent = np.frexp(np.linalg.norm(k, axis=-1))
    norms = np.ldexp(np.round(mantissa * 2**13) / 2**13, exponent)  # 12 bits after the leading one
    return lambda t, held: [-norms[ids, h] for h, ids in enumerate(held)]


@ranks("KeyDiff", dict(compression_ratio=2.9, interval=4))
def keydiff(k) -> Worth:
    def worth(t, held):
        scores = []
        for h, ids in enumerate(held):
            unit = k[ids, h] / np.linalg.norm(k[ids, h], axis=-1, keepdims=True)
            anchor = unit.mean(axis=0)
            scores.append(-(unit @ anchor) / np.linalg.norm(anchor))
        return scores

    return worth


@ranks(
    "SnapKV",
    dict(budget=9, interval=4, window=3, kernel=5),
    dict(budget=7, interval=None, window=4, kernel=3),
)
def snapkv(q, k, window: int, kernel: int) -> Worth:
    scale, group = default_scale(q, None), q.shape[1] // k.shape[1]

    def worth(t, held):
        scores = []
        for h, ids in enumerate(held):
            old = len(ids) - window
            rows = np.zeros((group, old))
            for g in range(group):
                for query in range(t - window + 1, t + 1):
                    seen = [j for j in ids if j <= query]
                    weights = attention_weights(q[query, h * group + g], k[seen, h], scale)
                    rows[g] += weights[:old] / window
            smooth, half = np.full(kernel, 1 / kernel), kernel // 2
            pooled = [np.convolve(row, smooth)[half : half + old] for row in rows]
            scores.append(np.append(np.mean(pooled, axis=0), np.full(window, np.inf)))
        return scores

    return worth


@ranks(
    "ExpectedAttention",
    dict(budget=11, interval=4, future=16, epsilon=0.01, recent=2),
    dict(budget=7, interval=None, sinks=0, covariance=False, value_norm=False),
)
def expected_attention(
    queries,
    k,
    v,
    *,
    theta: float,
    sinks: int,
    recent: int,
    future: int,
    covariance: bool,
    epsilon: float,
    value_norm: bool = True,
) -> Worth:
    """Scores keys by expected attention; `queries` [T, H, D] are unrotated, k is rotated."""
    group, dim = queries.shape[1] // k.shape[1], k.shape[2]

    def worth(t, held):
        cos, sin = rope.angles(np.arange(t + 1, t + 1 + future), dim, theta)
        turned = rope.rotate_tokens(np.repeat(np.eye(dim)[None], future, 0), cos, sin)
        rotation = turned.mean(axis=0).T  # R e_i is the i-th column
        scores = []
        for h, ids in enumerate(held):
            others = ids[sinks : len(ids) - recent]
            keys, values = k[others, h], v[others, h]
            total = np.zeros(len(keys))
            for g in range(group):
                past = queries[sinks : t + 1, h * group + g]
                logits = keys @ rotation @ past.mean(axis=0) / np.sqrt(dim)
                if covariance:
                    spread = rotation @ np.cov(past.T, bias=True) @ rotation.T
                    logits += np.einsum("sd,de,se->s", keys, spread, keys) / (2 * dim)
                weights = np.exp(logits - logits.max())
                total += weights / weights.sum() / group
            if value_norm:
                total = (total + epsilon) * np.linalg.norm(values, axis=-1)
            scores.append(np.concatenate([np.full(sinks, np.inf), total, np.full(recent, np.inf)]))
        return scores

    return worth


def when_rkv(budget: int, interval: int) -> When:
    return lambda seen, prompt, held: (seen - prompt) % interval == 0 and held >= budget + interval


@ranks(
    "RKV",
    dict(budget=9, interval=4, window=3, kernel=3, mix=0.3),
    dict(compression_ratio=2.6, interval=3, window=2, kernel=5),
    when=when_rkv,
)
def rkv(q, k, window: int, kernel: int, mix: float) -> Worth:
    """Attention of the last queries less the redundancy of keys, one head and key at a time."""
    scale, group = default_scale(q, None), q.shape[1] // k.shape[1]

    def attention(t, ids, h):
        old = ids[:-window]
        votes = np.zeros(len(old))
        for query in range(t - window + 1, t + 1):
            logits = [k[old, h] @ q[query, h * group + g] * scale for g in range(group)]
            largest = np.max(logits, axis=0)
            weights = np.exp(largest - largest.max())
            votes += weights / weights.sum() / window
        reach = kernel // 2
        return np.array([votes[max(0, j - reach) : j + reach + 1].max() for j in range(len(old))])

    def redundancy(ids, h):
        unit = [key / (np.linalg.norm(key) + 1e-8) for key in k[ids, h]]
        alike = np.array(
            [[0 if i == j else a @ b for j, b in enumerate(unit)] for i, a in enumerate(unit)]
        )
        for row in alike:
            above = [j for j, cosine in enumerate(row) if cosine > 0.5]
            row[above[-1] if above else 0] = 0
        mean = alike.mean(axis=0)
        shares = np.exp(mean - mean.max())
        return shares / shares.sum()

    def worth(t, held):
        scores = []
        for h, ids in enumerate(held):
            older = len(ids) - window
            score = mix * attention(t, ids, h) - (1 - mix) * redundancy(ids, h)[:older]
            scores.append(np.append(score, np.full(window, np.inf)))
        return scores

    return worth


def when_triattention(budget: int, interval: int, counts_prompt: bool) -> When:
    def when(seen, prompt, held):
        beside = held if counts_prompt else held - prompt
        return seen % interval == 0 and beside >= budget and prompt < budget

    return when


@ranks(
    "TriAttention",
    dict(budget=9, interval=4, furthest=40),
    dict(budget=8, interval=3, counts_prompt=True, furthest=9),
    when=when_triattention,
)
def triattention(
    queries,
    k,
    *,
    prompt_length: int,
    theta: float,
    furthest: int,
    centres: Callable[[int, int], tuple[np.ndarray, np.ndarray]] | None = None,
) -> Worth:
    """The published sum over distances and planes; `queries` [T, H, D] are unrotated, k is rotated.

    `centres` gives the complex means [half] of a query head's planes and the means of their norms
    after so many tokens; None for those of the queries themselves.
    """
    group, dim = queries.shape[1] // k.shape[1], k.shape[2]
    omega = theta ** (-np.arange(0, dim, 2) / dim)
    planes = queries[..., : dim // 2] + 1j * queries[..., dim // 2 :]

    def own_centres(head, seen):
        return planes[:seen, head].mean(0), np.abs(planes[:seen, head]).mean(0)

    distances = [2**n for n in range(20) if 2**n <= furthest]

    def of_head(head, seen, ids):
        mean, norm = (centres or own_centres)(head, seen)
        scores = []
        for j in ids:
            rotated = k[j, head // group]
            key = (rotated[: dim // 2] + 1j * rotated[dim // 2 :]) * np.exp(-1j * j * omega)
            phase = np.angle(mean * np.conj(key))
            by_distance = [
                np.sum(np.abs(mean) * np.abs(key) * np.cos((seen - j + d) * omega + phase))
                for d in distances
            ]
            extra = np.sum((norm - np.abs(mean)) * np.abs(key))
            scores.append(np.mean(by_distance) + extra)
        return np.array(scores)

    def worth(t, held):
        scores = []
        for h, ids in enumerate(held):
            may_go = [j for j in ids if j >= prompt_length]
            own = [of_head(h * group + g, t + 1, may_go) for g in range(group)]
            scores.append(np.append(np.full(len(ids) - len(may_go), np.inf), np.max(own, axis=0)))
        return scores

    return worth
