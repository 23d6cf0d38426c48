"""Attention of one new token to rows of pages (decoding)."""

from pallas_kernels.decode.api import decode_attention

__all__ = ["decode_attention"]
