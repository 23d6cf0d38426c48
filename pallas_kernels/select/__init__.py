"""The indices of the largest scores of each row (top-k without an order)."""

from pallas_kernels.select.api import select_largest

__all__ = ["select_largest"]
