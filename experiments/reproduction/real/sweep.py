"""What the recipe could have been: one setting of it changed at a time.

All have the same lessons and, unless tokens are what is changed, as many tokens as the settings
give a sweep: few, so that there can be many. Each is compared with the middle of the sweep, the
library's recipe to a ratio of 4.
"""

import dataclasses
import functools
from typing import Any

import dms_jax
from dms_jax import recipes
from dms_jax.training import Recipe
from experiments.reproduction.real.training import SWEEP, WINDOW, Training

_FACTOR = 3


def _concatenated(ratio: float, **options: Any) -> Recipe:
    return dataclasses.replace(recipes.dms_self_taught(ratio, **options), packing="concatenate")


def _rates(factor: float) -> Any:
    stage = recipes.dms_self_taught().stages[0]
    assert stage.adapter_learning_rate is not None
    rates = dict(
        learning_rate=factor * stage.learning_rate,
        adapter_learning_rate=factor * stage.adapter_learning_rate,
    )
    return functools.partial(recipes.dms_self_taught, **rates)


def _tried(name: str, words: str = "", **changed: Any) -> Training:
    return Training(SWEEP + name, ratio=4.0, words=words, **changed)


CENTRE = _tried("middle")
SWEEPS = (  # in the order of their worth
    _tried("window-64", policy=dms_jax.DMS(window=64, source="adapter")),
    _tried(
        "shift-0",
        "deciding for itself (shift 0)",
        policy=dms_jax.DMS(window=WINDOW, shift=0, source="adapter"),
    ),
    _tried("correct", "correct answers alone", lessons="correct"),
    _tried("texts", "texts in place of answers", lessons="texts"),
    _tried("greedy", "greedy answers alone", lessons="greedy"),
    _tried("adapter", trainable="adapter"),
    _tried("all", trainable="all"),
    _tried("concatenated", "documents cut where sequences end", make=_concatenated),
    _tried("rates-up", f"rates {_FACTOR} times as high", make=_rates(_FACTOR)),
    _tried("rates-down", f"rates {_FACTOR} times as low", make=_rates(1 / _FACTOR)),
    _tried("window-256", policy=dms_jax.DMS(window=256, source="adapter")),
    _tried("sampled", "sampled answers alone", lessons="sampled"),
    _tried("cooler", "answers at the lower temperature alone", lessons="cooler"),
    _tried("warmer", "answers at the higher temperature alone", lessons="warmer"),
    _tried("fewer-tokens", "a third of the tokens", share=1 / _FACTOR),
    _tried("more-tokens", f"{_FACTOR} times the tokens", share=float(_FACTOR)),
    _tried("window-128", policy=dms_jax.DMS(window=128, source="adapter")),
)
