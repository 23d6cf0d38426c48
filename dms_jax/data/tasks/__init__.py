"""Synthetic tasks with exact scores: reasoning with worked solutions, and RULER's retrieval."""

from dms_jax.data.tasks.base import SPLITS, Problem, Split, Task, split_of
from dms_jax.data.tasks.reasoning import Arithmetic, LinearEquation, Reasoning, WordChain
from dms_jax.data.tasks.retrieval import Needle, Retrieval, VariableTracking

__all__ = [
    "SPLITS",
    "Arithmetic",
    "LinearEquation",
    "Needle",
    "Problem",
    "Reasoning",
    "Retrieval",
    "Split",
    "Task",
    "VariableTracking",
    "WordChain",
    "split_of",
]
