"""KVpop: the token with the lowest learned score leaves a head that holds more than its budget.

own and late [T, K] come from the scorer: the score of token j is own_j + late_{j + window}, and is
complete when token j + window has come. After the attention of token t a head with more than
`budget` tokens evicts the one of lowest score among those that token t + 1 need not see, j <= t -
window. Equal scores: the older slot is evicted, and of a prompt the older token.

`prefill`: "evict_past_budget" treats prompt tokens like generated ones; "dense_then_evict" lets the
whole prompt attend densely and cuts once after its last token, to the budget's highest scores.
"""

import numpy as np

from tests.oracles.trace import Recorder, Trace, as_float64, attend_live, default_scale, is_dense


def score(own, late, token: int, now: int, window: int) -> float:
    """The score of a token of one head after token `now`; infinite inside the window."""
    return np.inf if token > now - window else own[token] + late[token + window]


def simulate(
    q,
    k,
    v,
    prompt_length: int = 0,
    *,
    own,
    late,
    budget: int,
    window: int,
    prefill: str = "evict_past_budget",
) -> Trace:
    """Simulate over q [T, H, D], k, v [T, K, D], all rotated, and own, late [T, K]."""
    q, k, v, own, late = as_float64(q, k, v, own, late)
    scale = default_scale(q, None)
    recorder = Recorder(q.shape[1])
    slots: list[list[int]] = [[] for _ in range(k.shape[1])]
    victims: list[int | None] = [None] * k.shape[1]
    for t in range(len(q)):
        for head, row in enumerate(slots):
            victim = victims[head]
            if victim is None:
                row.append(t)
            else:
                row[row.index(victim)] = t
            victims[head] = None
        live = [list(row) for row in slots]
        output = attend_live(q[t], k, v, live, scale)
        dense = is_dense(prefill) and t < prompt_length
        kept = []
        for head, row in enumerate(slots):
            scores = [score(own[:, head], late[:, head], j, t, window) for j in row]
            if dense and t == prompt_length - 1 and len(row) > budget:
                order = sorted(range(len(row)), key=lambda slot: (scores[slot], slot))
                row[:] = [row[slot] for slot in sorted(order[-budget:])]
            elif not dense and len(row) > budget:
                victims[head] = row[int(np.argmin(scores))]
            kept.append([j for j in row if j != victims[head]])
        recorder.step(output, live, kept=kept)
    return recorder.trace()
