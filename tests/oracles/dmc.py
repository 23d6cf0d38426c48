"""DMC (Dynamic Memory Compression): merge a token into the last slot, or open a new one.

Per KV head, Algorithm 1 of the paper, one token after the other, on keys before rotation:

    alpha_t = 1[k_t[n] - c > 0]          (1 = merge; the first token always opens a slot)
    omega_t = sigmoid(mean over the group's query heads of q_t[n] + c) + epsilon
    merge:  z += omega_t;  slot = (z_old * slot + omega_t * x_t) / z         for x = key, value
    open:   append x_t;    z = omega_t

c = 5 and epsilon as in the released code (the paper leaves both out of omega). The neuron n (last
dim; the paper says first) of every query and key head is zeroed before rotation and again after it.
A pooled key is rotated with the position of the last token merged into it, so merging rewrites it.
Values keep all their dims.

`window=w` is the released code's form: only the last w tokens of a segment count in its slot.
Training relaxes alpha to (0, 1); `pool` is the closed form of the same sums (Eq. 9) for any alpha:

    x~_t = sum_j c_j x_j / sum_j c_j,   c_j = omega_j prod_{u=j+1..t} alpha_u,   t - w < j <= t

and slots that a later token merged into fade by the bias log(1 - alpha_{j+1}) on key j != query.

Variants of the paper's ablations (appendix E): `per="layer"` (DMC-HardC) shares decision and
importance over the heads of a layer, which we read as the mean of the raw neurons; uniform
weighting is omega = 1; fixed pooling averages every n tokens.
"""

from collections.abc import Callable

import numpy as np

from tests.oracles.rope import rotate, rotate_tokens
from tests.oracles.trace import Recorder, Trace, as_float64, attend, default_scale

BFLOAT16_EPSILON = 0.0078125


def as_it_is(x: np.ndarray) -> np.ndarray:
    return x


def sigmoid(x):
    return np.exp(-np.logaddexp(0.0, -np.asarray(x, np.float64)))


def merge_logits(k, *, neuron: int = -1, offset: float = 5.0, per: str = "head") -> np.ndarray:
    """[T, K]: merge where above zero; k [T, K, D] before rotation."""
    raw = np.array(k, np.float64)[:, :, neuron]
    if per == "layer":
        raw[:] = raw.mean(axis=1, keepdims=True)
    return raw - offset


def importance_weights(
    q,
    kv_heads: int,
    *,
    neuron: int = -1,
    offset: float = 5.0,
    epsilon: float = BFLOAT16_EPSILON,
    per: str = "head",
) -> np.ndarray:
    """[T, K]: omega; q [T, H, D] before rotation."""
    raw = np.asarray(q, np.float64)[:, :, neuron]
    raw = raw.reshape(len(raw), kv_heads, -1).mean(axis=-1)
    if per == "layer":
        raw[:] = raw.mean(axis=1, keepdims=True)
    return sigmoid(raw + offset) + epsilon


def without_neuron(x, neuron: int | None):
    x = np.array(x, np.float64)
    if neuron is not None:
        x[..., neuron] = 0.0
    return x


class Segment:
    """One slot of one head: the tokens merged so far, and their running weighted mean."""

    def __init__(self, window: int | None):
        self.window = window
        self.last = -1
        self.members: list[tuple[np.ndarray, np.ndarray, float]] = []
        self.total = 0.0
        self.key = self.value = 0.0

    def add(self, token: int, key, value, weight: float) -> None:
        self.last = token
        if self.window is None:
            total = self.total + weight
            self.key = (self.total * self.key + weight * key) / total
            self.value = (self.total * self.value + weight * value) / total
            self.total = total
            return
        self.members = [*self.members, (key, value, weight)][-self.window :]
        total = sum(weight for _, _, weight in self.members)
        self.key = sum(weight * key for key, _, weight in self.members) / total
        self.value = sum(weight * value for _, value, weight in self.members) / total


def simulate(
    q,
    k,
    v,
    prompt_length: int = 0,
    *,
    cos,
    sin,
    window: int | None = None,
    neuron: int | None = -1,
    offset: float = 5.0,
    epsilon: float = BFLOAT16_EPSILON,
    decisions=None,
    importance=None,
    scale: float | None = None,
    stored: Callable[[np.ndarray], np.ndarray] = as_it_is,
    center: np.ndarray | None = None,
) -> Trace:
    """Simulate over q [T, H, D], k, v [T, K, D] before rotation and cos, sin [T, D/2].

    decisions [T, K] (1 = merge) and importance [T, K] replace the neuron's; with neuron=None both
    must be given and nothing is zeroed. Live ids are the last token of each slot. Prompt and
    generated tokens are treated alike. `stored` returns vectors after a round trip through a cache
    of few bits, which holds keys without `center` [K, D].
    """
    q, k, v = as_float64(q, k, v)
    scale = default_scale(q, scale)
    query_heads, kv_heads = q.shape[1], k.shape[1]
    if decisions is None:
        decisions = merge_logits(k, neuron=neuron, offset=offset) > 0
    if importance is None:
        importance = importance_weights(q, kv_heads, neuron=neuron, offset=offset, epsilon=epsilon)
    queries = without_neuron(rotate_tokens(without_neuron(q, neuron), cos, sin), neuron)
    k = without_neuron(k, neuron)
    center = np.zeros(k.shape[1:]) if center is None else center
    recorder = Recorder(query_heads)
    cache: list[list[Segment]] = [[] for _ in range(kv_heads)]
    for t in range(len(q)):
        keys, values = [], []
        for head, segments in enumerate(cache):
            if not segments or not decisions[t][head]:
                segments.append(Segment(window))
            segments[-1].add(t, k[t, head], v[t, head], float(importance[t][head]))
            rotated = [rotate(slot.key, cos[slot.last], sin[slot.last]) for slot in segments]
            rotated = without_neuron(np.stack(rotated), neuron) - center[head]
            keys.append(stored(rotated) + center[head])
            values.append(stored(np.stack([slot.value for slot in segments])))
        group = query_heads // kv_heads
        output = [
            attend(queries[t, head], keys[head // group], values[head // group], scale)
            for head in range(query_heads)
        ]
        recorder.step(output, [[slot.last for slot in segments] for segments in cache])
    return recorder.trace()


def pool(x, alpha, omega, window: int | None = None) -> np.ndarray:
    """[T, D]: Eq. 9 in closed form for one head; x [T, D], alpha [T] in [0, 1], omega [T].

    alpha[0] is not used: nothing comes before the first token.
    """
    x, alpha, omega = as_float64(x, alpha, omega)
    pooled = np.zeros_like(x)
    for t in range(len(x)):
        first = 0 if window is None else max(0, t - window + 1)
        coefficients = np.array(
            [omega[j] * alpha[j + 1 : t + 1].prod() for j in range(first, t + 1)]
        )
        pooled[t] = coefficients @ x[first : t + 1] / coefficients.sum()
    return pooled


def merge_bias(log_one_minus_alpha) -> np.ndarray:
    """[T, T] added to scaled scores: key j carries log(1 - alpha_{j+1}) for every later query.

    A key's own query sees it unbiased, the last key has no successor, and keys after the query
    are -inf.
    """
    bias = np.append(np.asarray(log_one_minus_alpha, np.float64)[1:], 0.0)
    mask = np.where(np.tri(len(bias), dtype=bool), bias[None, :], -np.inf)
    np.fill_diagonal(mask, 0.0)
    return mask


def soft_attention(
    q,
    k,
    v,
    alpha,
    omega,
    log_one_minus_alpha,
    *,
    cos,
    sin,
    window: int | None = None,
    neuron: int | None = -1,
    scale: float | None = None,
) -> np.ndarray:
    """[T, H, D]: training's pass; q, k, v before rotation, alpha, omega and the log [T, K]."""
    q, k, v, alpha, omega, log_keep = as_float64(q, k, v, alpha, omega, log_one_minus_alpha)
    scale = default_scale(q, scale)
    group = q.shape[1] // k.shape[1]
    queries = without_neuron(rotate_tokens(without_neuron(q, neuron), cos, sin), neuron)
    k = without_neuron(k, neuron)
    outputs = np.zeros_like(q)
    for head in range(q.shape[1]):
        kv_head = head // group
        keys = pool(k[:, kv_head], alpha[:, kv_head], omega[:, kv_head], window)
        keys = without_neuron(rotate(keys, cos, sin), neuron)
        values = pool(v[:, kv_head], alpha[:, kv_head], omega[:, kv_head], window)
        mask = merge_bias(log_keep[:, kv_head])
        for t in range(len(q)):
            outputs[t, head] = attend(
                queries[t, head], keys[: t + 1], values[: t + 1], scale, mask[t, : t + 1]
            )
    return outputs


def fixed_pooling(length: int, kv_heads: int, every: int) -> tuple[np.ndarray, np.ndarray]:
    """Decisions and weights [T, K] of fixed pooling: every `every` tokens are averaged."""
    merge = (np.arange(length) % every != 0).astype(int)
    return np.repeat(merge[:, None], kv_heads, axis=1), np.ones((length, kv_heads))


def gate(logits, noise, temperature: float = 0.1, per: str = "head"):
    """Eq. 8: (alpha, hard decision, log(1 - alpha)) of logits k[n] - c, all [T, K].

    The first token of a sequence has nothing to merge into: its alpha is 0. per="layer"
    (DMC-HardC): the logits are the layer's already, and one draw holds for all heads.
    """
    if per == "layer":
        noise = np.repeat(np.asarray(noise)[:, :1], noise.shape[1], axis=1)
    noisy = (np.asarray(logits, np.float64) + np.asarray(noise, np.float64)) / temperature
    noisy[0] = -np.inf
    return sigmoid(noisy), (noisy > 0).astype(int), -np.logaddexp(0.0, noisy)
