"""Files of a run directory: JSON written beside its place and renamed; provenance."""

import datetime
import json
import os
import pathlib
from collections.abc import Set
from importlib import metadata
from typing import Any

import dms_jax


def provenance() -> dict[str, Any]:
    """Versions and date of this run."""
    return {
        "versions": {name: metadata.version(name) for name in ("jax", "jaxlib", "flax")},
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
    }


def write_json(path: pathlib.Path, data: Any) -> None:
    """Writes a file beside its place and renames it."""
    write_text(path, json.dumps(data) + "\n")


def write_text(path: pathlib.Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def read_json(path: pathlib.Path) -> Any:
    """What a file holds; None where there is none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def refuse_other_settings(before: Any, config: Any, names: Set[str]) -> None:
    """Refuses to go on in a run directory with other settings than those that made what it holds.

    Raises:
      ConfigError: a setting of these names differs.
    """
    other = [
        f"{name}={getattr(before, name)!r}, not {getattr(config, name)!r}"
        for name in vars(config)
        if name in names and getattr(before, name) != getattr(config, name)
    ]
    if other:
        raise dms_jax.ConfigError(
            f"{config.out} holds what was made with {'; '.join(other)}. Give the same settings to "
            "go on, or another --out."
        )
