"""Imports of packages that only an extra of this package installs."""

import importlib
from typing import Any

from dms_jax.errors import ConfigError, DmsJaxError


def import_extra(
    module: str,
    *,
    extra: str,
    purpose: str,
    package: str | None = None,
    error: type[DmsJaxError] = ConfigError,
) -> Any:
    """Imports a module on first use.

    Args:
      module: name of the module.
      extra: the extra that installs it.
      purpose: the feature that needs it, as the subject of a sentence.
      package: name of the package for the message; None for that of the module.
      error: class of the error.

    Raises:
      DmsJaxError: the package is not installed; the message says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as missing:
        package = package or module.partition(".")[0]
        raise error(
            f"{purpose} needs {package}, which is not installed. Install the extra `{extra}`: "
            f"pip install 'dms-jax[{extra}]'."
        ) from missing
