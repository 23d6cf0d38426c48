"""The trace of a simulated policy, and the attention of one query over the slots it reads.

Everything is one sequence and one layer, in NumPy float64, one token after the other. Shapes: T
tokens, H query heads, K KV heads, G = H/K, D head dim. Query head h reads KV head h // G.
"""

import dataclasses

import numpy as np


@dataclasses.dataclass
class Trace:
    """The outputs and cache contents of a simulated policy, token by token.

    outputs: [T, H, D], the attention outputs. live: live[t][kv_head] lists, in slot order, the
    cache's entries while token t attends (token t itself included): token ids, or for DMC the last
    token merged into each slot. kept: the same after the eviction that follows token t's attention;
    equal to `live` except for the policies that evict after attention. attended: attended[t][head]
    lists the ids that the query head read, in ascending order. shared: whether the query heads of a
    KV head select together, and read the selection once.
    """

    outputs: np.ndarray
    live: list[list[list[int]]]
    kept: list[list[list[int]]]
    attended: list[list[list[int]]]
    shared: bool = False

    @property
    def live_counts(self) -> np.ndarray:
        """Returns the entries in the cache while each token attends, [T, K]."""
        return np.array([[len(head) for head in step] for step in self.live])

    @property
    def reads(self) -> np.ndarray:
        """Returns the entries read by each query head at each token, [T, H]."""
        return np.array([[len(head) for head in step] for step in self.attended])

    @property
    def peak(self) -> np.ndarray:
        """Returns the most entries that each KV head ever held, [K]."""
        return self.live_counts.max(axis=0)


class Recorder:
    """Records a `Trace` while a policy is simulated."""

    def __init__(self, query_heads: int):
        self.query_heads = query_heads
        self.outputs: list[np.ndarray] = []
        self.live: list[list[list[int]]] = []
        self.kept: list[list[list[int]]] = []
        self.attended: list[list[list[int]]] = []

    def step(self, output, live, kept=None, attended=None):
        """Records one token; lists are per KV head, `attended` per query head."""
        live = [[int(slot) for slot in head] for head in live]
        group = self.query_heads // len(live)
        self.outputs.append(np.array(output))
        self.live.append(live)
        kept = live if kept is None else [[int(slot) for slot in head] for head in kept]
        self.kept.append(kept)
        if attended is None:
            attended = [live[head // group] for head in range(self.query_heads)]
        self.attended.append([sorted(int(slot) for slot in head) for head in attended])

    def trace(self) -> Trace:
        return Trace(np.stack(self.outputs), self.live, self.kept, self.attended)


def as_float64(*arrays):
    return tuple(np.asarray(array, np.float64) for array in arrays)


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def attention_weights(query: np.ndarray, keys: np.ndarray, scale: float, bias=0.0) -> np.ndarray:
    """Returns the softmax weights [S] of one query [D] over keys [S, D]."""
    return softmax(keys @ query * scale + bias)


def attend(query, keys, values, scale, bias=0.0) -> np.ndarray:
    """Returns the attention [D] of one query [D] over keys and values [S, D]."""
    return attention_weights(query, keys, scale, bias) @ values


def attend_live(queries, k, v, live, scale) -> np.ndarray:
    """Returns the attention of query heads [H, D] over tokens `live[kv_head]` of k, v [T, K, D]."""
    group = queries.shape[0] // k.shape[1]
    return np.stack(
        [
            attend(
                query,
                k[live[head // group], head // group],
                v[live[head // group], head // group],
                scale,
            )
            for head, query in enumerate(queries)
        ]
    )


def default_scale(q: np.ndarray, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def is_dense(prefill: str) -> bool:
    """Whether a prompt gets full attention and one cut, unlike generated tokens."""
    return {"dense_then_evict": True, "evict_past_budget": False}[prefill]


def follow(q, k, v, heads: list[list[list[int]]], scale: float) -> Trace:
    """The trace over slots that do not depend on attention: heads[kv_head][t] lists them."""
    recorder = Recorder(q.shape[1])
    for t in range(len(q)):
        live = [head[t] for head in heads]
        recorder.step(attend_live(q[t], k, v, live, scale), live)
    return recorder.trace()
