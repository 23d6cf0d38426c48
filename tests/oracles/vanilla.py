"""The vanilla (uncompressed) cache: every token is appended and kept."""

from tests.oracles.trace import Recorder, Trace, as_float64, attend_live, default_scale


def simulate(q, k, v, prompt_length: int = 0, *, scale: float | None = None) -> Trace:
    """Simulates causal attention of q [T, H, D] over k, v [T, K, D], all rotated already."""
    q, k, v = as_float64(q, k, v)
    scale = default_scale(q, scale)
    recorder = Recorder(q.shape[1])
    for t in range(len(q)):
        live = [list(range(t + 1)) for _ in range(k.shape[1])]
        recorder.step(attend_live(q[t], k, v, live, scale), live)
    return recorder.trace()
