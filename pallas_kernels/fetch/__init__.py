"""The gather of rows from a store that may be in host memory."""

from pallas_kernels.fetch.api import fetch_rows

__all__ = ["fetch_rows"]
