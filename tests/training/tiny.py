"""A tiny model to retrofit, recipes of a few steps, and batches of random tokens."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

from dms_jax.model.language_model import LanguageModel
from dms_jax.policies import DMS
from dms_jax.training.recipe import Recipe, Stage
from tests.support.models import VOCABULARY, random_model, tiny_config

LENGTH = 12
ADAPTER = DMS(window=3, source="adapter")
NEURON = DMS(window=3, source="query_neuron")
# Some decisions are positive from the start, for tests of a few steps.
EAGER = DMS(window=3, source="adapter", alpha_scale=2.0, alpha_offset=0.5)


@functools.cache
def language_model(*, adapter: bool = False, dtype: Any = jnp.float32, **fields: Any):
    model = random_model(tiny_config(**fields), adapter=adapter, dtype=dtype)
    return LanguageModel(transformer=model)


def recipe(*stages: Stage, **changes: Any) -> Recipe:
    options: dict[str, Any] = dict(
        name="tiny",
        stages=stages or (Stage("ramp", 6, 1e-3, 4.0, adapter_learning_rate=1e-2),),
        sequence_length=LENGTH,
        batch_size=4,
        trainable="all",
        compute_dtype=None,
        remat="nothing",
    )
    return Recipe(**(options | changes))


def documents(count: int = 32, seed: int = 0) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(0, VOCABULARY, random.integers(3, 20)).tolist() for _ in range(count)]
