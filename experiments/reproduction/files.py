"""Files of a run directory: JSON written beside its place and renamed; provenance."""

import datetime
import json
import os
import pathlib
from importlib import metadata
from typing import Any


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
