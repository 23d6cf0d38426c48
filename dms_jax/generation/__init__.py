"""Generation: sampling, the engine, scoring, and estimates."""

from dms_jax.devices import Device
from dms_jax.generation.api import Generation, Score, generate, score
from dms_jax.generation.engine import Engine, EngineKeywords, EngineOptions
from dms_jax.generation.grammar import Grammar
from dms_jax.generation.memory import Estimate, estimate
from dms_jax.generation.requests import Completion, Update
from dms_jax.generation.sampling import Sampling

__all__ = [
    "Completion",
    "Device",
    "Engine",
    "EngineKeywords",
    "EngineOptions",
    "Estimate",
    "Generation",
    "Grammar",
    "Sampling",
    "Score",
    "Update",
    "estimate",
    "generate",
    "score",
]
