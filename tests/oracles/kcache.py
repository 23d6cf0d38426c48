"""KCache (He & Wu 2024): all keys on the device, only the top-N values fetched.

    weights = softmax(q k^T / sqrt(D)) over every key;  out = sum over the N largest of weight * v

The weights are not normalised again after the cut, so less than the whole mass is summed. Each
query head fetches its own N; the newest token is not protected. Prompt queries and the first
`device_layers` layers read every value. Equal weights: the earlier token is fetched.
"""

import numpy as np

from tests.oracles.trace import Recorder, Trace, as_float64, attention_weights, default_scale


def simulate(
    q,
    k,
    v,
    prompt_length: int = 0,
    *,
    top: int,
    layer: int = 0,
    device_layers: int = 0,
    scale: float | None = None,
) -> Trace:
    """Simulate over q [T, H, D] and k, v [T, K, D]; `attended` lists the values fetched."""
    q, k, v = as_float64(q, k, v)
    scale = default_scale(q, scale)
    query_heads, kv_heads = q.shape[1], k.shape[1]
    group = query_heads // kv_heads
    recorder = Recorder(query_heads)
    for t in range(len(q)):
        outputs, attended = [], []
        for head in range(query_heads):
            keys, values = k[: t + 1, head // group], v[: t + 1, head // group]
            weights = attention_weights(q[t, head], keys, scale)
            if t < prompt_length or layer < device_layers:
                ids = np.arange(t + 1)
            else:
                ids = np.argsort(-weights, kind="stable")[:top]
            outputs.append(weights[ids] @ values[ids])
            attended.append(ids)
        recorder.step(outputs, [list(range(t + 1))] * kv_heads, attended=attended)
    return recorder.trace()
