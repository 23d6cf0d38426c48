"""The files of the checkout that git does not ignore, as they stand."""

import hashlib
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The packages of `make clients`.
CLIENTS = ROOT / os.environ.get("CLIENTS", ".clients")
# Figures that scripts wrote: large, and no part of the code.
RESULTS = "experiments/results/"


def files(without: str | None = None) -> list[str]:
    """Returns their names from the root, but those that begin with `without`."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    names = set(listed.stdout.decode().split("\0")) - {""}
    kept = [name for name in names if without is None or not name.startswith(without)]
    return sorted(name for name in kept if (ROOT / name).is_file())


def digest(names: Iterable[str]) -> str:
    """Returns a hash of files, by their names and contents."""
    found = hashlib.sha256()
    for name in names:
        text = (ROOT / name).read_bytes()
        found.update(f"{name}\0{len(text)}\0".encode() + text)
    return found.hexdigest()
