"""Training: losses, schedules, recipes, the step and the loop."""

from dms_jax.training import recipes
from dms_jax.training.api import retrofit, train
from dms_jax.training.calibration import calibrate, calibrate_queries
from dms_jax.training.held_out import held_out_loss
from dms_jax.training.options import RunKeywords, RunOptions
from dms_jax.training.planning import Plan, plan
from dms_jax.training.recipe import Recipe, Stage

__all__ = [
    "Plan",
    "Recipe",
    "RunKeywords",
    "RunOptions",
    "Stage",
    "calibrate",
    "calibrate_queries",
    "held_out_loss",
    "plan",
    "recipes",
    "retrofit",
    "train",
]
