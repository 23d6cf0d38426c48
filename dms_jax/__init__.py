"""Generate with a small KV cache: DMS and its peers in JAX, Flax and Pallas."""

import importlib
import importlib.metadata
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dms_jax import assets, evaluation, policies
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
    from dms_jax.evaluation import evaluate, hyperscale
    from dms_jax.generation import Engine, Sampling, estimate, generate, score
    from dms_jax.model.initialization import initialize
    from dms_jax.model.language_model import LanguageModel
    from dms_jax.policies import *  # noqa: F403
    from dms_jax.sharding import make_mesh
    from dms_jax.training import Recipe, calibrate, plan, recipes, retrofit, train

    __version__: str
    __all__ = [
        "BusyError",
        "CapacityError",
        "CheckpointError",
        "ConfigError",
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
        "evaluation",
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
        "train",
    ]
    __all__ += policies.__all__

# Names are imported on first use: importing JAX, Flax and Optax takes seconds, and `dms-jax --help`
# should not wait for them. The policies are public here as well.
_PLACES = {
    "checkpoint": "load save",
    "config": "ModelConfig",
    "devices": "Device",
    "errors": """
        BusyError CapacityError CheckpointError ConfigError DataError DmsJaxError OtherProcessError
        OutOfMemoryError TrainingDivergedError
    """,
    "evaluation": "evaluate hyperscale",
    "generation": "Engine Sampling estimate generate score",
    "model.initialization": "initialize",
    "model.language_model": "LanguageModel",
    "sharding": "make_mesh",
    "training": "Recipe calibrate plan recipes retrofit train",
}
_MODULES = {name: place for place, names in _PLACES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value = _version()
    elif name == "__all__":
        value = ["__version__", "assets", "evaluation", "policies", *_MODULES]
        value += importlib.import_module("dms_jax.policies").__all__
    elif name in _MODULES:
        value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    else:
        value = _policy(name) if name[:1].isupper() else _submodule(name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})


def _version() -> str:
    """Returns the version of the installed package."""
    try:
        return importlib.metadata.version("dms-jax")
    except importlib.metadata.PackageNotFoundError:
        return "0+checkout"  # an uninstalled checkout


def _policy(name: str) -> Any:
    """Returns a cache policy by its name."""
    policies = importlib.import_module("dms_jax.policies")
    if name in policies.__all__:
        return getattr(policies, name)
    raise _unknown(name)


def _submodule(name: str) -> Any:
    """Imports a package or module of this one."""
    try:
        return importlib.import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}.{name}":
            raise
    raise _unknown(name)


def _unknown(name: str) -> AttributeError:
    """Returns an AttributeError; Python adds the most similar name."""
    message = f"module {__name__!r} has no attribute {name!r}"
    return AttributeError(message, name=name, obj=sys.modules[__name__])
