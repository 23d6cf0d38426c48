"""A tiny checkpoint directory to change, and its tensors."""

import json
import pathlib
import shutil

import numpy as np
from safetensors.numpy import load_file, save_file

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"


def copy(source: str, target: pathlib.Path) -> pathlib.Path:
    """Copy a golden checkpoint without its expected outputs."""
    shutil.copytree(GOLDEN / source, target, ignore=shutil.ignore_patterns("expected.safetensors"))
    return target


def tensors(directory: pathlib.Path) -> dict[str, np.ndarray]:
    """Every tensor of a directory."""
    found = {}
    for file in sorted(directory.glob("model*.safetensors")):
        found |= load_file(file)
    return found


def rewrite(directory: pathlib.Path, content: dict[str, np.ndarray]) -> None:
    """Replaces the tensors of a directory."""
    for file in directory.glob("*.safetensors*"):
        file.unlink()
    save_file(content, directory / "model.safetensors")


def edit_config(directory: pathlib.Path, **fields) -> None:
    """Change fields of config.json; None takes one away."""
    file = directory / "config.json"
    config = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({name: v for name, v in config.items() if v is not None}))
