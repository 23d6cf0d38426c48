"""Trainers of one process share compiled steps.

Each trainer jits a step of its own, and nearly all the time of a tiny run is that of tracing and
compiling it. What a step computes follows from the model's structure, the policy and the recipe;
weights, rates and targets are its inputs.
"""

import dataclasses
from typing import Any

import jax

from dms_jax.training.recipe import Stage
from dms_jax.training.trainer import Trainer

_STEPS: dict[Any, Any] = {}
_jitted_step = Trainer._jitted_step


def shared_step(trainer: Trainer) -> Any:
    """Stands in for `Trainer._jitted_step`."""
    if trainer._mesh is not None:
        return _jitted_step(trainer)
    host = dict(name="", stages=(Stage("train", 1, 0.0),), snapshots=(), ignore_end_token=False)
    settings = dataclasses.replace(trainer.recipe, **host)
    structure = jax.tree.structure(trainer._skeleton.transformer)
    key = structure, trainer._skeleton.policy, settings, trainer._everywhere
    if key not in _STEPS:
        _STEPS[key] = _jitted_step(trainer)
    return _STEPS[key]
