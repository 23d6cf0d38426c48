"""Importance of tokens to later queries, and the scorer that predicts it, in NumPy float64.

    c_hij = a_hij * |W_o^h v_j| / |x_i|     for queries i > j + window of the same document
    s_j   = the largest c_hij over i and the query heads h of the group (KVzip+, KVzap), or the mean

a are the softmax weights of full causal attention, x_i the input of the layer's attention. The
logarithm is bounded below by -16. That of the first `sinks` tokens of a document is unknown, or for
a policy that has to learn to keep them (`sinks_known`) 0. The scorer: norm, a linear map, or two
with GELU (tanh form) between them; the output times 10 and minus 6 is the logarithm.
"""

import numpy as np

from tests.oracles.trace import as_float64, attention_weights, default_scale

SCALE, LEVEL, LEAST = 10.0, -6.0, -16.0


def log_importance(
    q,
    k,
    v,
    inputs,
    output,
    *,
    window: int,
    reduction: str = "max",
    documents=None,
    scale=None,
    sinks: int = 0,
    sinks_known: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the logarithm [T, K] and which tokens have one [T].

    q [T, H, D] and k [T, K, D] rotated, v [T, K, D], inputs [T, E], output [H, D, E].
    """
    q, k, v, inputs, output = as_float64(q, k, v, inputs, output)
    scale = default_scale(q, scale)
    length, query_heads = q.shape[:2]
    kv_heads = k.shape[1]
    group = query_heads // kv_heads
    documents = np.zeros(length, int) if documents is None else np.asarray(documents)
    given: list[list[list[float]]] = [[[] for _ in range(kv_heads)] for _ in range(length)]
    for i in range(length):
        seen = [j for j in range(i + 1) if documents[j] == documents[i]]
        for h in range(query_heads):
            weights = attention_weights(q[i, h], k[seen, h // group], scale)
            for j, weight in zip(seen, weights, strict=True):
                if i - j > window:
                    gain = np.linalg.norm(v[j, h // group] @ output[h])
                    given[j][h // group].append(weight * gain / np.linalg.norm(inputs[i]))
    known = np.array([bool(token[0]) for token in given])
    reduce = {"max": np.max, "mean": np.mean}[reduction]
    result = np.full((length, kv_heads), LEAST)
    for j in np.flatnonzero(known):
        result[j] = [max(np.log(reduce(head)), LEAST) for head in given[j]]
        if list(documents[:j]).count(documents[j]) < sinks:
            result[j], known[j] = 0.0, sinks_known
    return result, known


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def features(residual, norm, hidden, epsilon: float) -> np.ndarray:
    """The inputs of a scorer's output layers: [T, E], or [T, hidden] after hidden units."""
    x = residual / np.sqrt((residual**2).mean(axis=-1, keepdims=True) + epsilon) * norm
    return x if hidden is None else gelu(hidden(x))
