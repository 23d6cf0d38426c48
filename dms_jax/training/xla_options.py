"""XLA options for training programs.

On GPUs, the stacks that a loop over layers keeps for the backward pass (11 GB in a step of
Qwen2.5-0.5B) are not zero-filled first, as every layer writes its own slice.

For several GPUs:

    latency hiding scheduler   starts a collective as early as its operands are there, and waits for
                               it as late as its result is needed, with compute in between
    double-buffered loops      unroll the loop over layers by two, for the weights of the next layer
                               to arrive while this one computes; in compiled steps of a 1B model
                               the second layer still waits for the first
    combining thresholds       gather and reduce the matrices of one layer together, never those of
                               several layers, which would take more memory
    high-priority stream       communication is not queued behind compute

TPUs do this by default.
"""

from collections.abc import Iterable

import jax

_COMBINED_BYTES = 2**28
ONE_GPU_OPTIONS: dict[str, bool | int | str] = {
    "xla_gpu_enable_dus_accumulator_zero_init_elimination": True,
}
GPU_OPTIONS: dict[str, bool | int | str] = ONE_GPU_OPTIONS | {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_enable_while_loop_double_buffering": True,
    "xla_gpu_enable_highest_priority_async_stream": True,
    "xla_gpu_all_gather_combine_threshold_bytes": _COMBINED_BYTES,
    "xla_gpu_reduce_scatter_combine_threshold_bytes": _COMBINED_BYTES,
    "xla_gpu_all_reduce_combine_threshold_bytes": _COMBINED_BYTES,
}


def compiler_options(devices: Iterable[jax.Device]) -> dict[str, bool | int | str]:
    """Returns the options for a training program over these devices."""
    devices = list(devices)
    if devices[0].platform not in ("gpu", "cuda"):
        return {}
    return dict(GPU_OPTIONS if len(devices) > 1 else ONE_GPU_OPTIONS)
