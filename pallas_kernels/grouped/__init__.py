"""Products of groups of rows, each group with its own matrix."""

from pallas_kernels.grouped.api import grouped_product

__all__ = ["grouped_product"]
