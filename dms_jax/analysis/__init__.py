"""Analysis of policies: tokens kept and read by heads, a latency model, an HTML page."""

from dms_jax.analysis.page import View, eviction_page, token_texts
from dms_jax.analysis.retention import NEVER, Retention, retention

__all__ = [
    "NEVER",
    "Retention",
    "View",
    "eviction_page",
    "retention",
    "token_texts",
]
