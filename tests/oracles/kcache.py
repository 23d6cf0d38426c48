"""KCache (He & Wu 2024): all keys on the device, only the top-N values fetched.

    weights = softmax(q k^T / sqrt(D)) over every key;  out = sum over the N largest of weight * v

The weights are not renormalised after the selection, so they sum to less than one. Each query head
fetches its own N; the newest token is not protected. Prompt queries and the first `device_layers`
layers read every value. Equal weights: the earlier slot is fetched.

Reads are counted in entries of a key and a value: where there is something to select, each key of a
row is half an entry, and so is every value that a query head fetches.
"""

import dataclasses

import numpy as np

from tests.oracles.trace import Recorder, Trace, as_float64, attention_weights, default_scale


@dataclasses.dataclass
class Fetched(Trace):
    """`attended` lists the values that were read."""

    @property
    def entries(self) -> np.ndarray:
        """Returns the entries read by all rows of the layer, each rounded up, [T]."""
        live = self.live_counts
        heads = self.reads.reshape(*live.shape, -1)
        everything = (heads == live[..., None]).all(-1)
        entries = np.where(everything, live, -(-(live + heads.sum(-1)) // 2))
        return entries.sum(-1)


def simulate(
    q,
    k,
    v,
    prompt_length: int = 0,
    *,
    top: int,
    layer: int = 0,
    device_layers: int = 0,
    kept: Trace | None = None,
    scale: float | None = None,
) -> Fetched:
    """Simulate over q [T, H, D] and k, v [T, K, D].

    `kept` is the trace of an evicting policy; values are selected among the tokens that it keeps.
    """
    q, k, v = as_float64(q, k, v)
    scale = default_scale(q, scale)
    query_heads, kv_heads = q.shape[1], k.shape[1]
    group = query_heads // kv_heads
    recorder = Recorder(query_heads)
    for t in range(len(q)):
        live = [list(range(t + 1))] * kv_heads if kept is None else kept.live[t]
        outputs, attended = [], []
        for head in range(query_heads):
            slots = np.array(live[head // group])
            keys, values = k[slots, head // group], v[slots, head // group]
            weights = attention_weights(q[t, head], keys, scale)
            if t < prompt_length or layer < device_layers:
                chosen = np.arange(len(slots))
            else:
                chosen = np.argsort(-weights, kind="stable")[:top]
            outputs.append(weights[chosen] @ values[chosen])
            attended.append(slots[chosen])
        recorder.step(outputs, live, attended=attended)
    return Fetched(**vars(recorder.trace()))
