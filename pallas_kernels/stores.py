"""Stores from registers in Mosaic GPU kernels, on every jax that is supported."""

from jax.experimental.pallas import mosaic_gpu as plgpu


def store(ref, value) -> None:
    """Stores an array of registers to shared or global memory, in whatever order its layout gives.

    From jax 0.12 on an assignment asks for a transfer of whole cache lines and without bank
    conflicts, and fails, or searches for minutes, where the layout allows none. The results that
    are written this way, one row at a time, are small.
    """
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:  # jax 0.11
        ref[...] = value
