"""Generate with a small KV cache: DMS and its peers in JAX, Flax and Pallas."""

import importlib
import importlib.metadata
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dms_jax import assets as assets
    from dms_jax import evaluation as evaluation
    from dms_jax import policies as policies
    from dms_jax.checkpoint import load as load
    from dms_jax.checkpoint import save as save
    from dms_jax.config import ModelConfig as ModelConfig
    from dms_jax.devices import Device as Device
    from dms_jax.errors import BusyError as BusyError
    from dms_jax.errors import CapacityError as CapacityError
    from dms_jax.errors import CheckpointError as CheckpointError
    from dms_jax.errors import ConfigError as ConfigError
    from dms_jax.errors import DataError as DataError
    from dms_jax.errors import DmsJaxError as DmsJaxError
    from dms_jax.errors import OtherProcessError as OtherProcessError
    from dms_jax.errors import OutOfMemoryError as OutOfMemoryError
    from dms_jax.errors import TrainingDivergedError as TrainingDivergedError
    from dms_jax.evaluation import evaluate as evaluate
    from dms_jax.evaluation import hyperscale as hyperscale
    from dms_jax.generation import Conversation as Conversation
    from dms_jax.generation import Engine as Engine
    from dms_jax.generation import Sampling as Sampling
    from dms_jax.generation import estimate as estimate
    from dms_jax.generation import generate as generate
    from dms_jax.generation import score as score
    from dms_jax.model.initialization import initialize as initialize
    from dms_jax.model.language_model import LanguageModel as LanguageModel
    from dms_jax.policies import *  # noqa: F403
    from dms_jax.sharding import make_mesh as make_mesh
    from dms_jax.training import Recipe as Recipe
    from dms_jax.training import calibrate as calibrate
    from dms_jax.training import plan as plan
    from dms_jax.training import recipes as recipes
    from dms_jax.training import retrofit as retrofit
    from dms_jax.training import train as train

    __version__: str

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
    "generation": "Conversation Engine Sampling estimate generate score",
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
