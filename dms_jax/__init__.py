"""Generate with a small KV cache: DMS and its peers in JAX, Flax and Pallas."""

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

from dms_jax import policies
from dms_jax.checkpoint import load, save
from dms_jax.config import ModelConfig
from dms_jax.devices import Device
from dms_jax.errors import (
    BusyError,
    CapacityError,
    CheckpointError,
    ConfigError,
    DataError,
    DmsJaxError,
    OtherProcessError,
    OutOfMemoryError,
    TrainingDivergedError,
)
from dms_jax.generation import (
    Conversation,
    Engine,
    Sampling,
    estimate,
    generate,
    score,
)
from dms_jax.model.grouped_query import to_grouped_query
from dms_jax.model.initialization import initialize
from dms_jax.model.language_model import LanguageModel
from dms_jax.policies import *  # noqa: F403
from dms_jax.sharding import make_mesh
from dms_jax.training import Recipe, calibrate, plan, recipes, retrofit, train

if TYPE_CHECKING:
    from dms_jax import assets
    from dms_jax.evaluation import evaluate, hyperscale

try:
    __version__ = importlib.metadata.version("dms-jax")
except importlib.metadata.PackageNotFoundError:  # a checkout that is not installed
    __version__ = "0+checkout"


def __getattr__(name: str) -> Any:
    """Imports what only some need when it is first asked for: evaluations, and the assets."""
    if name == "assets":
        return importlib.import_module("dms_jax.assets")
    if name in ("evaluation", "evaluate", "hyperscale"):
        evaluation = importlib.import_module("dms_jax.evaluation")
        return evaluation if name == "evaluation" else getattr(evaluation, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "BusyError",
    "CapacityError",
    "CheckpointError",
    "ConfigError",
    "Conversation",
    "DataError",
    "Device",
    "DmsJaxError",
    "Engine",
    "LanguageModel",
    "ModelConfig",
    "OtherProcessError",
    "OutOfMemoryError",
    "Recipe",
    "Sampling",
    "TrainingDivergedError",
    "__version__",
    "assets",
    "calibrate",
    "estimate",
    "evaluate",
    "generate",
    "hyperscale",
    "initialize",
    "load",
    "make_mesh",
    "plan",
    "policies",
    "recipes",
    "retrofit",
    "save",
    "score",
    "to_grouped_query",
    "train",
]
__all__ += policies.__all__
