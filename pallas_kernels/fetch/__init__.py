"""Rows fetched out of a store that may lie in host memory."""

from pallas_kernels.fetch.api import fetch_rows

__all__ = ["fetch_rows"]
