"""DMS (Dynamic Memory Sparsification): delayed eviction by learned marks, one token at a time.

Decision d_t (1 = evict) of token t and KV head h is about key t - shift. A key j stays visible to
query i while i - j <= window; after that only if it was not marked:

    visible(i, j)  iff  j <= i and (i - j <= window or mark_j == 0),   mark_j = d_{j + shift}

and a key whose decision never came is not marked. The cache of a head is a list of slots and a ring
of the last window + 1 entries (slot, mark). Token t first delivers its decision to the entry of key
t - shift; then the entry leaving the ring is read: if marked, token t overwrites its slot, else
token t is appended. With shift 0 the mark is the token's own and enters with it. Keys are rotated
with true positions, so the order of slots does not matter.
"""

import numpy as np

from tests.oracles.rope import rotate_tokens
from tests.oracles.trace import Trace, as_float64, default_scale, follow


def slots_per_step(decisions, window: int, shift: int) -> list[list[int]]:
    """The slots of one head after each token; decisions [T], 1 = evict, shift <= window + 1."""
    if not 0 <= shift <= window + 1:
        raise ValueError(f"shift {shift} does not fit window {window}")
    slots: list[int] = []
    ring: list[tuple[int, int]] = [(-1, 0)] * (window + 1)
    steps = []
    for t, decision in enumerate(decisions):
        if shift > 0 and t - shift >= 0:
            slot, _ = ring[(t - shift) % (window + 1)]
            ring[(t - shift) % (window + 1)] = (slot, int(decision))
        slot, marked = ring[t % (window + 1)]
        if marked:
            slots[slot] = t
        else:
            slot = len(slots)
            slots.append(t)
        ring[t % (window + 1)] = (slot, int(decision) if shift == 0 else 0)
        steps.append(list(slots))
    return steps


def visible(decisions, window: int, shift: int) -> np.ndarray:
    """The same as a mask [T, T] (query, key), from the definition and without a cache."""
    length = len(decisions)
    mask = np.zeros((length, length), bool)
    for query in range(length):
        for key in range(query + 1):
            marked = key + shift < length and bool(decisions[key + shift])
            mask[query, key] = query - key <= window or not marked
    return mask


def simulate(
    q,
    k,
    v,
    prompt_length: int = 0,
    *,
    decisions,
    window: int,
    shift: int = 1,
    per: str = "head",
    scale: float | None = None,
) -> Trace:
    """Simulate over q [T, H, D], k, v [T, K, D], all rotated, and decisions [T, K] of 0 and 1.

    per="layer": the decisions of KV head 0 hold for all. Prompt and generated tokens are treated
    alike, so `prompt_length` changes nothing.
    """
    q, k, v = as_float64(q, k, v)
    scale = default_scale(q, scale)
    decisions = np.asarray(decisions).astype(int)
    if per == "layer":
        decisions = np.repeat(decisions[:, :1], decisions.shape[1], axis=1)
    return follow(q, k, v, [slots_per_step(head, window, shift) for head in decisions.T], scale)


def from_query_neuron(q, k, cos, sin, *, alpha_scale: float = 100.0, alpha_offset: float = 5.0):
    """Logits from the borrowed neuron, and the rotated q and k that attention then sees.

    q [T, H, D] after the query norm and before rotation, k [T, K, D], cos and sin [T, D/2]. The
    neuron is the last dim of the first query head of each group; it is zeroed before the rotation,
    which would carry it into dim D/2 - 1, and again after, when D/2 - 1 was turned into it.

    Returns logits [T, K] (evict where > 0), q [T, H, D], k [T, K, D].
    """
    q, k = as_float64(q, k)
    q = q.copy()
    group = q.shape[1] // k.shape[1]
    logits = q[:, ::group, -1] * alpha_scale - alpha_offset
    q[:, ::group, -1] = 0.0
    q = rotate_tokens(q, cos, sin)
    q[:, ::group, -1] = 0.0
    return logits, q, rotate_tokens(k, cos, sin)


def decide(logits) -> np.ndarray:
    """Returns 1 where a key is to be evicted: where its logit is strictly above zero."""
    return (np.asarray(logits) > 0).astype(int)


def gate(logits, noise, temperature: float = 0.1, per: str = "head"):
    """Training's relaxation: (gate logit, alpha, hard decision, bias), of logits and noise [T, K].

    l = (a + noise) / temperature, alpha = sigmoid(l), hard = 1[alpha > 1/2], bias = log(1 - alpha).
    per="layer": the decision of KV head 0, its draw included, holds for all.
    """
    if per == "layer":
        logits, noise = (np.repeat(np.asarray(x)[:, :1], x.shape[1], 1) for x in (logits, noise))
    gate_logits = (np.asarray(logits, np.float64) + np.asarray(noise, np.float64)) / temperature
    alpha = np.exp(-np.logaddexp(0.0, -gate_logits))
    return gate_logits, alpha, (gate_logits > 0).astype(int), -np.logaddexp(0.0, gate_logits)


def soft_mask(bias, window: int, shift: int = 1) -> np.ndarray:
    """[T, T] added to scaled scores: key j carries bias[j + shift] for queries beyond the window.

    `bias` [T] is log(1 - alpha) of each token's decision; keys with no decision yet carry 0, and
    keys after the query -inf.
    """
    length = len(bias)
    mask = np.full((length, length), -np.inf)
    for query in range(length):
        for key in range(query + 1):
            decided = key + shift < length
            mask[query, key] = bias[key + shift] if query - key > window and decided else 0.0
    return mask


def soft_attention(q, k, v, bias, *, window: int, shift: int = 1, scale: float | None = None):
    """[T, H, D]: training's attention over q [T, H, D], k, v [T, K, D], bias [T, K]."""
    q, k, v, bias = as_float64(q, k, v, bias)
    scale = default_scale(q, scale)
    group = q.shape[1] // k.shape[1]
    outputs = np.zeros_like(q)
    for head in range(q.shape[1]):
        kv_head = head // group
        scores = q[:, head] @ k[:, kv_head].T * scale
        scores = scores + soft_mask(bias[:, kv_head], window, shift)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        outputs[:, head] = weights / weights.sum(axis=1, keepdims=True) @ v[:, kv_head]
    return outputs


def compression_loss(decisions, target: float) -> float:
    """One-sided: mean over samples of max(0, target - share evicted); decisions [L, B, K, T]."""
    share = np.asarray(decisions, np.float64).mean(axis=(0, 2, 3))
    return float(np.maximum(target - share, 0.0).mean())
