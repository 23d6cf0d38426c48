"""H2O (Zhang et al. 2023): heavy hitters by accumulated attention, and the recent tokens.

Each KV head keeps, per token in its cache, the sum over all queries since of the softmax weight it
received: not a mean over queries, so old tokens are favoured, as published. With GQA the weight of
a query is the mean over the query heads of the group (the publication has one head a group).

After the attention of token t the current row is added first (the new token starts with its own
weight). If the cache then holds more than heavy + recent tokens, the last `recent` stay, and of the
others the `heavy` with the largest sums.

`prefill`: "evict_past_budget" treats prompt tokens like generated ones; "dense_then_evict" lets the
whole prompt attend densely, its sums accumulating, and cuts once after its last token.
Equal sums: the older token is evicted.
"""

import numpy as np

from tests.oracles.tova import heaviest
from tests.oracles.trace import (
    Recorder,
    Trace,
    as_float64,
    attend_live,
    attention_weights,
    default_scale,
    is_dense,
)


def simulate(
    q,
    k,
    v,
    prompt_length: int = 0,
    *,
    heavy: int,
    recent: int,
    prefill: str = "evict_past_budget",
    scale: float | None = None,
) -> Trace:
    """Simulate over q [T, H, D] and k, v [T, K, D], all rotated already; heavy + recent >= 1."""
    q, k, v = as_float64(q, k, v)
    scale = default_scale(q, scale)
    query_heads, kv_heads = q.shape[1], k.shape[1]
    group = query_heads // kv_heads
    recorder = Recorder(query_heads)
    cached: list[list[int]] = [[] for _ in range(kv_heads)]
    sums: list[dict[int, float]] = [{} for _ in range(kv_heads)]
    for t in range(len(q)):
        cached = [[*head, t] for head in cached]
        live = cached
        output = attend_live(q[t], k, v, live, scale)
        inside_prompt = is_dense(prefill) and t < prompt_length - 1
        kept = []
        for kv_head, ids in enumerate(cached):
            rows = [
                attention_weights(q[t, head], k[ids, kv_head], scale)
                for head in range(kv_head * group, (kv_head + 1) * group)
            ]
            for token, weight in zip(ids, np.mean(rows, axis=0), strict=True):
                sums[kv_head][token] = sums[kv_head].get(token, 0.0) + weight
            if len(ids) > heavy + recent and not inside_prompt:
                older, newer = ids[: len(ids) - recent], ids[len(ids) - recent :]
                weights = np.array([sums[kv_head][token] for token in older])
                ids = heaviest(older, weights, heavy) + newer
            kept.append(ids)
        cached = kept
        recorder.step(output, live, kept=kept)
    return recorder.trace()
