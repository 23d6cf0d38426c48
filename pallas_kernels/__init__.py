"""Pallas kernels for attention over a small KV cache, and their XLA references."""

from pallas_kernels.decode import DecodePlan, decode_attention, decode_plan
from pallas_kernels.fetch import fetch_rows
from pallas_kernels.grouped import grouped_product
from pallas_kernels.prefill import prefill_attention
from pallas_kernels.received import received_attention
from pallas_kernels.select import select_largest
from pallas_kernels.serving import Served, serving
from pallas_kernels.training import retrofit_attention
from pallas_kernels.update import rotate_and_write, write_pages

__all__ = [
    "DecodePlan",
    "Served",
    "decode_attention",
    "decode_plan",
    "fetch_rows",
    "grouped_product",
    "prefill_attention",
    "received_attention",
    "retrofit_attention",
    "rotate_and_write",
    "select_largest",
    "serving",
    "write_pages",
]
