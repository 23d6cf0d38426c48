"""Imports packages of the extra `eval` on first use; the error names a missing one."""

import importlib
from types import ModuleType

from dms_jax.errors import ConfigError


def import_extra(module: str, *, package: str, purpose: str) -> ModuleType:
    """Imports a module of the extra `eval`.

    Args:
      module: name of the module.
      package: name of the package, for messages.
      purpose: the feature that needs it, as the subject of a sentence.

    Raises:
      ConfigError: the package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{purpose} needs {package}, which is not installed. Install the extra `eval`: "
            "pip install 'dms-jax[eval]'."
        ) from error
