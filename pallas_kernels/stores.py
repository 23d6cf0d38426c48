"""Stores from registers in Mosaic GPU kernels, for all supported versions of jax."""

from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu

_store: Any = getattr(plgpu, "store", None)  # not in jax 0.11


def store(ref, value) -> None:
    """Stores an array of registers to shared or global memory, in the order of its layout.

    Since jax 0.12 an assignment requires a transfer of whole cache lines without bank conflicts,
    and fails, or searches for minutes, if the layout allows none. The results stored here, one row
    at a time, are small.
    """
    if _store is None:
        ref[...] = value
    else:
        _store(ref, value, optimized=False)
