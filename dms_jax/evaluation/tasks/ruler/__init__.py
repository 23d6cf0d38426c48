"""RULER's 13 tasks at any length."""

from dms_jax.evaluation.tasks.ruler.formats import RULER_TASKS, RulerName
from dms_jax.evaluation.tasks.ruler.task import RULER, ruler_tasks

__all__ = ["RULER", "RULER_TASKS", "RulerName", "ruler_tasks"]
