"""The write of new keys and values into their pages, in place."""

from pallas_kernels.update.api import write_pages

__all__ = ["write_pages"]
