"""Synthetic reasoning tasks with worked solutions and exact scores."""

from dms_jax.data.tasks.base import SPLITS, Problem, Split, Task, split_of
from dms_jax.data.tasks.reasoning import Arithmetic, LinearEquation, Reasoning, WordChain

__all__ = [
    "SPLITS",
    "Arithmetic",
    "LinearEquation",
    "Problem",
    "Reasoning",
    "Split",
    "Task",
    "WordChain",
    "split_of",
]
