"""Analysis of policies: the tokens that heads keep, and the figure of `hyperscale`."""

from dms_jax.analysis.retention import NEVER, Retention, retention

__all__ = ["NEVER", "Retention", "retention"]
