"""Packages of the extra `eval`: imported where they are used, named where they are missing."""

import importlib
from types import ModuleType

from dms_jax.errors import ConfigError


def import_extra(module: str, *, package: str, purpose: str) -> ModuleType:
    """Imports a module of the extra `eval`.

    Args:
      module: name of the module.
      package: name of the package, for messages.
      purpose: what needs it, as the subject of a sentence.

    Raises:
      ConfigError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{purpose} needs {package}, which is not installed. Install the extra `eval`: "
            "pip install 'dms-jax[eval]'."
        ) from error
