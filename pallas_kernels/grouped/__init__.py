"""The products of groups of rows, each with a matrix of its own."""

from pallas_kernels.grouped.api import grouped_product

__all__ = ["grouped_product"]
