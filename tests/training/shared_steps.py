"""Trainers of one process share compiled steps.

Each trainer jits its own step, and a tiny run spends nearly all its time on tracing and compiling
it. The model's structure, the policy and the recipe determine the step; weights, rates and targets
are its inputs.
"""

import dataclasses
from typing import Any

import jax

from dms_jax.training.program import StepProgram
from dms_jax.training.recipe import Stage

_STEPS: dict[Any, Any] = {}
_jit = StepProgram.jit


def shared_step(program: StepProgram) -> Any:
    """Stands in for `StepProgram.jit`."""
    if program._mesh is not None:
        return _jit(program)
    host = dict(name="", stages=(Stage("train", 1, 0.0),), snapshots=(), ignore_end_token=False)
    settings = dataclasses.replace(program.recipe, **host)
    structure = jax.tree.structure(program.rebuild(program.parameters))
    key = structure, program._policy, settings, program.everywhere
    if key not in _STEPS:
        _STEPS[key] = _jit(program)
    return _STEPS[key]
