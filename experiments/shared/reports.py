"""What a report says of the run that it is of, and the folder that it goes into."""

import dataclasses
import datetime
import pathlib
import platform
import shlex
import sys
from typing import Any

import jax

import dms_jax


def provenance(config: Any) -> dict[str, Any]:
    """How, where, when and with what settings figures were measured."""
    return {
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.date.today().isoformat(),
        "device": f"{jax.devices()[0].device_kind} ({platform.machine()})",
        "versions": {"python": platform.python_version(), "jax": jax.__version__},
        "config": {
            field.name: str(getattr(config, field.name)) for field in dataclasses.fields(config)
        },
    }


def make_folder(option: str, path: pathlib.Path) -> None:
    """Makes a folder that will be written to.

    Raises:
      ConfigError: that cannot be done.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise dms_jax.ConfigError(f"{option} {path}: {error.strerror}.") from error
