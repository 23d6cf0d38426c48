"""Analysis of policies: compression per head, a latency model, plots, a page of evicted tokens."""

from dms_jax.analysis.compression import evictions, live_after, memory_trace
from dms_jax.analysis.page import eviction_page, token_texts

__all__ = ["eviction_page", "evictions", "live_after", "memory_trace", "token_texts"]
