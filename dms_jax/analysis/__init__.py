"""Analysis of policies: what heads keep and read, memory, a latency model, a page."""

from dms_jax.analysis.memory_trace import memory_trace
from dms_jax.analysis.page import View, eviction_page, token_texts
from dms_jax.analysis.retention import NEVER, Retention, retention

__all__ = [
    "NEVER",
    "Retention",
    "View",
    "eviction_page",
    "memory_trace",
    "retention",
    "token_texts",
]
