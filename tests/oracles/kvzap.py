"""KVzap (Jegou and Jeblick 2026): a token whose predicted importance is low leaves the window.

score_j [T, K] predicts the logarithm of the token's importance. While i - j <= window query i sees
key j; after that only if score_j >= threshold or j < sinks. A token that leaves the window and is
not kept gives its slot to the token that displaces it.
"""

from tests.oracles.trace import Trace, as_float64, default_scale, follow


def slots_per_step(scores, threshold: float, window: int, sinks: int = 0) -> list[list[int]]:
    """The slots of one head after each token."""
    slots: list[int] = []
    steps = []
    for t in range(len(scores)):
        leaving = t - window - 1
        if leaving >= sinks and scores[leaving] < threshold:
            slots[slots.index(leaving)] = t
        else:
            slots.append(t)
        steps.append(list(slots))
    return steps


def simulate(q, k, v, *, scores, threshold: float, window: int, sinks: int = 0) -> Trace:
    """Simulate over q [T, H, D], k, v [T, K, D], all rotated, and scores [T, K]."""
    q, k, v, scores = as_float64(q, k, v, scores)
    scale = default_scale(q, None)
    heads = [slots_per_step(head, threshold, window, sinks) for head in scores.T]
    return follow(q, k, v, heads, scale)
