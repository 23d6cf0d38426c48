"""How the target of compression and the borrowed neuron change over the steps of a stage.

    ratio(t)  = start + (end - start) * min(t / steps, 1),     target(t) = 1 - 1 / ratio(t)
    neuron(t) = max(0, 1 - t / steps)

The ramp is linear in the compression ratio, not in the share of evicted tokens. NVIDIA's adapters
go from 1 to 16 in 510 steps (34 a unit); the paper takes 100 steps a unit.
"""

Number = int | float


def compression_ratio(step: int, *, start: Number, end: Number, steps: int) -> Number:
    """Returns the compression ratio that step `step` (from 0) of a ramp aims at."""
    return end if step >= steps else start + (end - start) * (step / steps)


def eviction_target(ratio: Number) -> Number:
    """Returns the share of tokens to evict for a compression ratio.

    # In: 8  Out: 0.875
    """
    return 1.0 - 1.0 / ratio


def neuron_scale(step: int, *, steps: int) -> Number:
    """Returns what is left of the borrowed neuron at step `step` (from 0) of its decay."""
    return max(0.0, 1.0 - step / steps)
