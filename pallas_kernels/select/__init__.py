"""The largest scores of each row: which they are."""

from pallas_kernels.select.api import select_largest

__all__ = ["select_largest"]
