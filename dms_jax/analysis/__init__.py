"""Analysis of policies: tokens kept by heads, hyperscale's figure."""

from dms_jax.analysis.retention import NEVER, Retention, retention

__all__ = ["NEVER", "Retention", "retention"]
