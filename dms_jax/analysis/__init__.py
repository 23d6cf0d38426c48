"""Analysis of policies: what heads keep and read, memory, a latency model, pictures, a page."""

from dms_jax.analysis.memory_trace import memory_trace
from dms_jax.analysis.over_training import OverTraining, over_training, snapshots_of
from dms_jax.analysis.page import View, eviction_page, token_texts
from dms_jax.analysis.retention import NEVER, Retention, retention

__all__ = [
    "NEVER",
    "OverTraining",
    "Retention",
    "View",
    "eviction_page",
    "memory_trace",
    "over_training",
    "retention",
    "snapshots_of",
    "token_texts",
]
