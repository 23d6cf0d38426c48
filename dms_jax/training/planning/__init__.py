"""Planning: what a training run takes in memory and time, without an accelerator."""

from dms_jax.training.planning.api import plan
from dms_jax.training.planning.machines import Machine, find_machine
from dms_jax.training.planning.result import Memory, Plan, StagePlan

__all__ = ["Machine", "Memory", "Plan", "StagePlan", "find_machine", "plan"]
