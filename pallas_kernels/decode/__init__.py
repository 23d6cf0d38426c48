"""Attention of one new token to rows of pages (decoding)."""

from pallas_kernels.decode.api import decode_attention, decode_plan
from pallas_kernels.decode.plan import DecodePlan

__all__ = ["DecodePlan", "decode_attention", "decode_plan"]
