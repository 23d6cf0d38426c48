"""Analysis of policies: what heads keep and read, a latency model, a page."""

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
