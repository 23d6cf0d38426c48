"""Schedules over the steps of a stage: compression ratio, borrowed neuron, learning rate.

    ratio(t)  = start + (end - start) * min(t / steps, 1),     target(t) = 1 - 1 / ratio(t)
    neuron(t) = max(0, 1 - t / steps)
    rate(t)   = peak * (t + 1) / warmup                                          for t < warmup
                final + (peak - final) * (1 + cos(pi * (t - warmup) / (steps - warmup))) / 2   then

The ramp is linear in the compression ratio, not in the share of evicted tokens. NVIDIA's adapters
go from 1 to 16 in 510 steps (34 per unit); the paper takes 100 steps per unit.
"""

import math

from dms_jax.checks import Number


def compression_ratio(step: int, *, start: Number, end: Number, steps: int) -> Number:
    """Returns the compression ratio that step `step` (from 0) of a ramp aims at."""
    return end if step >= steps else start + (end - start) * (step / steps)


def eviction_target(ratio: Number) -> Number:
    """Returns the share of tokens to evict for a compression ratio.

    # In: 8  Out: 0.875
    """
    return 1.0 - 1.0 / ratio


def neuron_scale(step: int, *, steps: int) -> Number:
    """Returns the scale of the borrowed neuron at step `step` (from 0) of its decay."""
    return max(0.0, 1.0 - step / steps)


def learning_rate(
    step: int, *, peak: Number, steps: int, warmup_steps: int = 0, final: Number | None = None
) -> Number:
    """Returns the learning rate of step `step` (from 0) of a stage.

    Args:
      step: number of the step; past the end of the stage, the rate stays at its last value.
      peak: rate after the warm-up.
      steps: steps of the stage.
      warmup_steps: steps over which the rate rises linearly; the last of them has the peak rate.
      final: rate to which a half-cosine falls over the rest of the stage; None keeps the peak.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if final is None:
        return peak
    passed = min(1.0, (step - warmup_steps) / max(steps - warmup_steps, 1))
    return final + (peak - final) * 0.5 * (1 + math.cos(math.pi * passed))
