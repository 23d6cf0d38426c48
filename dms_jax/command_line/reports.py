"""Reports of commands: provenance of figures, and output files."""

import contextlib
import dataclasses
import datetime
import importlib.util
import os
import pathlib
import platform
import tempfile
import warnings
from typing import Any

import jax

import dms_jax
from dms_jax.command_line.running import command
from dms_jax.json_text import json_text


def provenance(config: Any) -> dict[str, Any]:
    """Returns the command, device, versions and date of a measurement, as JSON data."""
    return {
        "command": command(),
        "date": datetime.date.today().isoformat(),
        "device": f"{jax.devices()[0].device_kind} ({platform.machine()})",
        "versions": {"python": platform.python_version(), "jax": jax.__version__},
        "config": {
            field.name: str(getattr(config, field.name)) for field in dataclasses.fields(config)
        },
    }


def make_folder(option: str, path: pathlib.Path) -> None:
    """Creates a folder, and tries a temporary file in it.

    Raises:
      ConfigError: it cannot be created, or no file can be written there.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise dms_jax.ConfigError(f"{option} {path}: {error.strerror}.") from error


def make_place(option: str, path: pathlib.Path) -> None:
    """Creates the folder of a file, and tries a temporary file in it.

    Raises:
      ConfigError: the folder cannot be created or written to, or the path is a folder.
    """
    make_folder(option, path.parent)
    if path.is_dir():
        raise dms_jax.ConfigError(f"{option} {path}: a folder has this name; name a file.")


def read_file(option: str, path: pathlib.Path) -> bytes:
    """Reads a file.

    Raises:
      ConfigError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise dms_jax.ConfigError(f"{option} {path}: {error.strerror}.") from error


def can_draw(path: pathlib.Path) -> bool:
    """Whether matplotlib is installed; otherwise warns what to install."""
    if importlib.util.find_spec("matplotlib") is not None:
        return True
    warnings.warn(f"{path} is not drawn: pip install 'dms-jax[plots]'", stacklevel=2)
    return False


def write_json(path: pathlib.Path, data: Any) -> None:
    """Writes JSON atomically (`write_text`); numbers that are not finite become null."""
    write_text(path, json_text(data, indent=1) + "\n")


def write_text(path: pathlib.Path, text: str) -> None:
    """Writes a text atomically.

    Raises:
      ConfigError: it cannot be written.
    """
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise dms_jax.ConfigError(f"{path} cannot be written: {error.strerror}.") from error
