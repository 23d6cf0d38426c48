"""What the recipe could have been: one setting of it changed at a time.

Each is the low-rank retrofit to 4 on 0.3 of the tokens but for that setting, and is compared with
it: `low-rank-to-4` is the middle of the sweep.
"""

import dataclasses
import functools
from typing import Any

import dms_jax
from dms_jax import recipes
from dms_jax.training import Recipe
from experiments.reproduction.real.training import SWEEP, WINDOW, Training

MIDDLE = "low-rank-to-4"
SHARE = 0.3
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


def _tried(name: str, words: str, **changed: Any) -> Training:
    return Training(SWEEP + name, ratio=4.0, share=SHARE, words=words, **changed)


SWEEPS = (
    *(
        _tried(f"window-{size}", "", policy=dms_jax.DMS(window=size, source="adapter"))
        for size in (64, 128, 256)
    ),
    _tried(
        "shift-0",
        "deciding for itself (shift 0)",
        policy=dms_jax.DMS(window=WINDOW, shift=0, source="adapter"),
    ),
    _tried("correct", "correct answers alone", lessons="correct"),
    _tried("texts", "texts in place of answers", lessons="texts"),
    _tried("greedy", "greedy answers alone", lessons="greedy"),
    _tried("sampled", "sampled answers alone", lessons="sampled"),
    _tried("rates-up", f"rates {_FACTOR} times as high", make=_rates(_FACTOR)),
    _tried("rates-down", f"rates {_FACTOR} times as low", make=_rates(1 / _FACTOR)),
    _tried("concatenated", "documents cut where sequences end", make=_concatenated),
)
