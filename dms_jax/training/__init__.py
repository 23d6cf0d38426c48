"""Retrofitting: losses, schedules, recipes, the step and the loop."""

from dms_jax.training import recipes
from dms_jax.training.loop import retrofit
from dms_jax.training.recipes import Recipe, Stage

__all__ = ["Recipe", "Stage", "recipes", "retrofit"]
