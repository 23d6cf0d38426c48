"""Writes new keys and values into their pages, in place, and rotates them before."""

from pallas_kernels.update.api import rotate_and_write, write_pages

__all__ = ["rotate_and_write", "write_pages"]
