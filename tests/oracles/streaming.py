"""StreamingLLM: the first tokens (attention sinks) and the most recent ones; true positions.

After token t the cache holds the tokens j with j < sinks or t - j < recent, t itself among the
recent. The publication renumbers positions inside the cache; here keys keep the rotation they were
written with, as in the common training-free comparisons.

`prefill`: "evict_past_budget" treats prompt tokens like generated ones; "dense_then_evict" lets
them attend to the whole prompt before them, and what is neither a sink nor among the recent leaves
after the last of them.
"""

from tests.oracles.trace import Recorder, Trace, as_float64, attend_live, default_scale, is_dense


def simulate(
    q,
    k,
    v,
    prompt_length: int = 0,
    *,
    sinks: int,
    recent: int,
    prefill: str = "evict_past_budget",
    scale: float | None = None,
) -> Trace:
    """Simulate over q [T, H, D] and k, v [T, K, D], all rotated already; recent >= 1."""
    q, k, v = as_float64(q, k, v)
    scale = default_scale(q, scale)
    recorder = Recorder(q.shape[1])
    sink_slots: list[int] = []
    recent_slots: list[int] = []
    for t in range(len(q)):
        if len(sink_slots) < sinks:
            sink_slots.append(t)
        else:
            recent_slots.append(t)
        # A sink within the recent window does not extend the window.
        window = [j for j in recent_slots if t - j < recent]
        if not is_dense(prefill) or t >= prompt_length:
            recent_slots = window
        live = [sink_slots + recent_slots for _ in range(k.shape[1])]
        if t == prompt_length - 1:
            recent_slots = window
        kept = [sink_slots + recent_slots for _ in range(k.shape[1])]
        recorder.step(attend_live(q[t], k, v, live, scale), live, kept=kept)
    return recorder.trace()
