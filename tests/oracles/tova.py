"""TOVA (Oren et al. 2024): evict the token that the last query attended to least.

After the attention of token t, the weight of each token in the cache is the mean of query t's
softmax weights over all query heads of the layer. If the cache holds more than `budget` tokens
(strictly), the `budget` heaviest are kept, the same for all KV heads. Nothing is protected: the
newest token may be evicted. The attention of token t itself saw budget + 1 tokens.

`prefill` is the treatment of a prompt:
- "evict_past_budget": its tokens are treated like generated ones, one after the other;
- "dense_then_evict": they attend to the whole prompt before them, and the cut is made once, by the
  row of the last prompt token.
Equal weights: the older token is evicted.
"""

import numpy as np

from tests.oracles.trace import (
    Recorder,
    Trace,
    as_float64,
    attend_live,
    attention_weights,
    default_scale,
    is_dense,
)


def heaviest(ids: list[int], weights: np.ndarray, count: int) -> list[int]:
    """Returns the `count` ids of largest weight, ascending; of equals the younger is kept."""
    order = sorted(range(len(ids)), key=lambda slot: (weights[slot], ids[slot]), reverse=True)
    return sorted(ids[slot] for slot in order[:count])


def simulate(
    q,
    k,
    v,
    prompt_length: int = 0,
    *,
    budget: int,
    prefill: str = "evict_past_budget",
    scale: float | None = None,
) -> Trace:
    """Simulate over q [T, H, D] and k, v [T, K, D], all rotated already; budget >= 1."""
    q, k, v = as_float64(q, k, v)
    scale = default_scale(q, scale)
    query_heads, kv_heads = q.shape[1], k.shape[1]
    group = query_heads // kv_heads
    recorder = Recorder(query_heads)
    cached: list[int] = []
    for t in range(len(q)):
        cached = [*cached, t]
        live = [cached] * kv_heads
        output = attend_live(q[t], k, v, live, scale)
        inside_prompt = is_dense(prefill) and t < prompt_length - 1
        if len(cached) > budget and not inside_prompt:
            rows = [
                attention_weights(q[t, head], k[cached, head // group], scale)
                for head in range(query_heads)
            ]
            cached = heaviest(cached, np.mean(rows, axis=0), budget)
        recorder.step(output, live, kept=[cached] * kv_heads)
    return recorder.trace()
